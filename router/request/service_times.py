"""Measured and estimated service times.

`ServiceTimeModel` estimates from measured rates (prompt tokens per second and
time between tokens of each pool, `router.workers.pace`) and from the history of each client
(`ClientHabits`). No request is rejected on a guess: a rate without a recent measurement counts as
zero time.
"""

import math
import statistics
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from router.workers.pace import PromptsAhead
from router.workers.worker import Booking, Worker
from runtime.clock import Clock
from runtime.pace import MEMORY_S, MIN_TOKENS, PrefillRateEstimate

MAX_CLIENTS = 1024  # clients with a history; the least recently seen is dropped
# Weight of a response halves after the first time, and becomes zero after the second.
HALF_LIFE_S = 60.0
FORGET_S = 300.0
KEPT_SHARE = 0.9  # of the previous weight, per response
# the clients' common share counts as two responses
MIN_CLIENTS = 3
USUAL_WEIGHT = 2.0
USUAL_S = 1.0  # minimum time between two computations of the common share
TRIAL_S = 2.0  # between two requests of a client that are served despite a bad estimate
MIN_ERRORS = 4  # services of one length before their errors count
REMEMBERED_ERRORS = 32
CAUTIOUS_QUANTILE = 0.9
START_CAUTION = 1.25
MAX_CAUTION = 4.0
FACTOR_S = 1.0
# Workers of a role that an estimate considers, spread over the fleet: every request needs one.
MOST_ASKED = 32


@dataclass(frozen=True)
class TokenWork:
    """Tokens to prefill and tokens to generate; the latter as expected, not as allowed."""

    prompt_tokens: float = 0.0
    output_tokens: float = 0.0

    @property
    def num_tokens(self) -> float:
        """Return the tokens of both kinds."""
        return self.prompt_tokens + self.output_tokens

    def more(self, other: "TokenWork") -> "TokenWork":
        return TokenWork(
            self.prompt_tokens + other.prompt_tokens, self.output_tokens + other.output_tokens
        )

    def less(self, other: "TokenWork") -> "TokenWork":
        """Return the difference, at least zero for each kind."""
        return TokenWork(
            max(0.0, self.prompt_tokens - other.prompt_tokens),
            max(0.0, self.output_tokens - other.output_tokens),
        )


@dataclass(frozen=True)
class Rates:
    """Rates of the usable workers.

    Tokens per second refer to all pools together; they are infinite until measured and while no
    request waits for them. Seconds per prompt token, seconds between two output tokens and the
    queued prompts refer to one pool.
    """

    prompt_tokens_per_s: float = math.inf
    output_tokens_per_s: float = math.inf
    prompt_token_s: float = 0.0
    output_token_s: float = 0.0
    ahead: PromptsAhead = field(default_factory=PromptsAhead)
    is_idle: bool = True  # a prefill worker and a decode pool have no request

    @classmethod
    def of(
        cls,
        sources: Sequence[Worker],
        pools: Sequence[Worker],
        num_waiting: int = 0,
        num_tokens: int = 1,
    ) -> "Rates":
        """Return the rates while `num_waiting` requests with prompts of about `num_tokens` are
        queued.

        No request waits for prefill while a worker has room for a prompt. A decode pool that could
        take more requests generates for more. A pool without measurement counts as the mean of the
        others. In a large fleet `MOST_ASKED` pools stand for all.
        """
        some_sources, some_pools = (
            workers[:: -(-len(workers) // MOST_ASKED) or 1] for workers in (sources, pools)
        )
        prefill = [rate for worker in some_sources if (rate := worker.prefill_pace.tokens_per_s)]
        has_room = any(worker.snapshot.has_room(num_tokens) for worker in some_sources)
        num_paced = 0
        tokens_per_s = 0.0
        between_s = 0.0
        for worker in some_pools:
            count = worker.num_sharing(num_waiting, num_tokens)
            if (token_s := worker.decode_pace.token_s(count)) is not None:
                num_paced = num_paced + 1
                tokens_per_s = tokens_per_s + count / token_s
                between_s = between_s + token_s
        ahead = PromptsAhead.of(
            [length for worker in some_sources for length in worker.prompts_ahead],
            max(len(some_sources), 1),
        )
        idle = all(
            any(not worker.num_booked for worker in workers)
            for workers in (some_sources, some_pools)
        )
        mean = sum(prefill) / len(prefill) if prefill else math.inf
        return cls(
            prompt_tokens_per_s=math.inf if has_room or not prefill else mean * len(sources),
            output_tokens_per_s=tokens_per_s / max(num_paced, 1) * len(pools) or math.inf,
            prompt_token_s=1 / mean,
            output_token_s=between_s / max(num_paced, 1),
            ahead=ahead,
            is_idle=idle,
        )

    def wait_s(self, ahead: TokenWork) -> float:
        """Return the time until the work in `ahead` has been placed, limited by the slower kind."""
        return max(
            ahead.prompt_tokens / self.prompt_tokens_per_s,
            ahead.output_tokens / self.output_tokens_per_s,
        )

    def service_s(self, work: TokenWork) -> float:
        """Return the time from placement on a pair of workers to the last token."""
        return self._service_s(self.ahead.before(work.prompt_tokens) + work.prompt_tokens, work)

    def placed_service_s(self, work: TokenWork) -> float:
        """Return `service_s` of a request that was just placed: its prompt is among those ahead."""
        return self._service_s(max(self.ahead.before(work.prompt_tokens), work.prompt_tokens), work)

    def _service_s(self, prompt_tokens: float, work: TokenWork) -> float:
        return prompt_tokens * self.prompt_token_s + work.output_tokens * self.output_token_s


@dataclass
class _Length:
    """Mean ratio of response length to `max_tokens`, weighted by age."""

    share: float = 0.0
    weight: float = 0.0
    seen_s: float = -math.inf

    def add(self, share: float, now_s: float) -> None:
        weight = self.weight_at(now_s) * KEPT_SHARE
        self.share = (self.share * weight + share) / (weight + 1)
        self.weight = weight + 1
        self.seen_s = now_s

    def weight_at(self, now_s: float) -> float:
        """Return the number of responses that the mean stands for at `now_s`."""
        age_s = now_s - self.seen_s
        return self.weight * 0.5 ** (age_s / HALF_LIFE_S) if age_s < FORGET_S else 0.0


@dataclass
class _SafetyFactor:
    """High quantile of actual over estimated service time, by length: short ones vary more."""

    # By octave of the estimate: (time, actual / estimated).
    errors: dict[int, deque[tuple[float, float]]] = field(default_factory=dict)
    factors: dict[int, tuple[float, float]] = field(default_factory=dict)  # (time, factor)

    def observe(self, estimated_s: float, actual_s: float, now_s: float) -> None:
        errors = self.errors.setdefault(_octave(estimated_s), deque(maxlen=REMEMBERED_ERRORS))
        errors.append((now_s, actual_s / estimated_s))

    def factor(self, estimated_s: float, now_s: float) -> float:
        octave = _octave(estimated_s)
        at_s, factor = self.factors.get(octave, (-math.inf, START_CAUTION))
        if now_s - at_s >= FACTOR_S:
            factor = self._reckoned(octave, now_s)
            self.factors[octave] = now_s, factor
        return factor

    def _reckoned(self, octave: int, now_s: float) -> float:
        errors = sorted(
            error for at_s, error in self.errors.get(octave, ()) if at_s >= now_s - MEMORY_S
        )
        if len(errors) < MIN_ERRORS:
            return START_CAUTION
        return min(max(errors[int(CAUTIOUS_QUANTILE * len(errors))], 1.0), MAX_CAUTION)


def _octave(seconds: float) -> int:
    return math.frexp(seconds)[1]


@dataclass
class _Habits:
    """History of one client; lengths by the bit length of `max_tokens`."""

    lengths: dict[int, _Length] = field(default_factory=dict)
    safety_factor: _SafetyFactor = field(default_factory=_SafetyFactor)
    tried_s: float = -math.inf


class ClientHabits:
    """Response lengths and estimation errors of each client.

    One client's history says little about another's. An estimate uses the history of its own
    client, and the share common to several clients while that is short. A client whose requests are
    rejected for the expected length has one served now and then all the same, so that it can show
    shorter ones.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._clients: OrderedDict[str, _Habits] = OrderedDict()  # most recently seen last
        # By bit length of the limit: (time, share); the share is None with too few clients.
        self._usual: dict[int, tuple[float, float | None]] = {}

    def answered(self, client: str, max_tokens: int, num_tokens: int) -> None:
        """Record a response of `num_tokens` that was not cut off."""
        length = self._of(client).lengths.setdefault(max_tokens.bit_length(), _Length())
        length.add(num_tokens / max_tokens, self._clock.now())

    def expected_tokens(self, client: str, max_tokens: int) -> float:
        """Return the expected number of tokens of a response; 0 if nothing is known."""
        limit = max_tokens.bit_length()
        now_s = self._clock.now()
        known = self._clients.get(client)
        own = (known.lengths.get(limit) if known is not None else None) or _Length()
        weight = own.weight_at(now_s)
        usual = self._usual_share(limit, now_s)
        if usual is not None:
            return (
                max_tokens * (own.share * weight + usual * USUAL_WEIGHT) / (weight + USUAL_WEIGHT)
            )
        return max_tokens * own.share if weight else 0.0

    def may_try(self, client: str) -> bool:
        """Return whether to serve a request expected to end too late, once per `TRIAL_S`."""
        habits = self._of(client)
        now_s = self._clock.now()
        if now_s - habits.tried_s < TRIAL_S:
            return False
        habits.tried_s = now_s
        return True

    def served(self, client: str, estimated_s: float, actual_s: float) -> None:
        """Record a service time. For a service that was cut off, `actual_s` is a lower bound."""
        if estimated_s > 0:
            self._of(client).safety_factor.observe(estimated_s, actual_s, self._clock.now())

    def safety_factor(self, client: str, estimated_s: float) -> float:
        """Return the factor by which a service may exceed its estimate: from 1 to `MAX_CAUTION`.

        Without it, a request admitted at the edge of its deadline, as all are under overload, would
        miss the deadline half of the time.
        """
        known = self._clients.get(client)
        return (
            START_CAUTION
            if known is None
            else known.safety_factor.factor(estimated_s, self._clock.now())
        )

    def _of(self, client: str) -> _Habits:
        habits = self._clients.setdefault(client, _Habits())
        self._clients.move_to_end(client)
        if len(self._clients) > MAX_CLIENTS:
            self._clients.popitem(last=False)
        return habits

    def _usual_share(self, limit: int, now_s: float) -> float | None:
        """Return the median share of the clients with a history for this limit.

        A client with extreme lengths moves the median by at most one place.
        """
        at_s, share = self._usual.get(limit, (-math.inf, None))
        if now_s - at_s >= USUAL_S:
            shares = [
                length.share
                for habits in self._clients.values()
                if (length := habits.lengths.get(limit)) is not None and length.weight_at(now_s)
            ]
            share = statistics.median(shares) if len(shares) >= MIN_CLIENTS else None
            self._usual[limit] = now_s, share
        return share


class ServiceTimeModel:
    """Estimates that a router has learned of its pools; its requests update them."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.best_prefill = PrefillRateEstimate(clock)
        self.habits = ClientHabits(clock)

    def work(
        self, client: str, prompt_tokens: int, max_tokens: int, num_sampled: int = 0
    ) -> TokenWork:
        """Return the work of a request that lacks `prompt_tokens` tokens of its prompt.

        `num_sampled` tokens of its response exist already: they are prefilled like a prompt.
        """
        to_read = max(prompt_tokens, MIN_TOKENS) + num_sampled
        return TokenWork(
            to_read, max(self.habits.expected_tokens(client, max_tokens) - num_sampled, 0.0)
        )

    def cautious_s(self, rates: Rates, client: str, work: TokenWork) -> float:
        """Return the service time that is not exceeded in nine of ten cases."""
        estimated_s = rates.service_s(work)
        return (
            estimated_s * self.habits.safety_factor(client, estimated_s) if estimated_s > 0 else 0.0
        )


class ServiceRecord:
    """Measurements of one request on its pools, for later estimates.

    Covers the time from placement to the end. A request that migrates yields no estimate: it was
    served twice.
    """

    def __init__(
        self, service_model: ServiceTimeModel, client: str, max_tokens: int, estimated_s: float
    ) -> None:
        """`estimated_s`: expected service time."""
        self._service_model = service_model
        self._client = client
        self._max_tokens = max_tokens
        self._estimated_s = estimated_s
        self._since_s = service_model.clock.now()
        self._pool: Booking | None = None
        self._committed_s = 0.0
        self._num_sampled = 0
        self._has_moved = False

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        """Record the prefill time that the worker reports."""
        self._service_model.best_prefill.observe(num_tokens, seconds)

    def committed(self, pool: Booking) -> None:
        """Mark the start of decoding."""
        pool.began()
        self._pool, self._committed_s = pool, self._service_model.clock.now()

    def sampled(self, num_tokens: int) -> None:
        """Count tokens that the decode pool sampled."""
        self._num_sampled += num_tokens

    def moved(self) -> None:
        """Mark that the request has migrated."""
        self._has_moved = True

    def ended(self, num_tokens: int) -> None:
        """Record the end of the request, with a response of `num_tokens`."""
        if num_tokens:
            self._service_model.habits.answered(self._client, self._max_tokens, num_tokens)
        self._note()

    def finished(self, decode_s: float) -> None:
        """Record the decode time that the pool reports; its memory is free."""
        if self._pool is None:
            return
        self._pool.finished()
        if not self._has_moved:
            self._pool.answered(self._num_sampled, decode_s)
        self._pool = None  # a later `cut_off` records nothing for the pool

    def cut_off(self) -> None:
        """Record the end at the deadline: the request would have taken at least this long."""
        if self._pool is not None and not self._has_moved:
            self._pool.answered(
                self._num_sampled, self._service_model.clock.now() - self._committed_s
            )
        self._note()

    def _note(self) -> None:
        if not self._has_moved:
            self._service_model.habits.served(
                self._client, self._estimated_s, self._service_model.clock.now() - self._since_s
            )
