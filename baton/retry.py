"""Decisions about retries: when to call again, at which router, and where to resume a response.

Pure: time and random numbers are inputs, decisions are outputs.
"""

import math
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from baton.values import Chunk, Event, PromptLogprobs, Query
from runtime.clock import Clock, Deadline
from runtime.errors import (
    BatonError,
    CapacityError,
    DuplicateRequestError,
    FieldViolation,
    HandoffError,
    InvalidRequestError,
    PeerLostError,
    UnavailableError,
)

FIRST_SUSPICION_S = 0.5
LAST_SUSPICION_S = 8.0
SPREAD_S = 0.05  # spreads the streams of a failed router over the others
MAX_JITTER = 0.25  # share of the server's retry delay that is added at random
MAX_ASKED_S = 30.0  # limit on a server's retry delay, as the cause may end long before
MAX_NAP_S = 5.0  # limit on one pause within such a delay
MAX_TIMEOUT_S = 1e9  # 30 years


@dataclass(frozen=True)
class Retry:
    """Limits and pauses of retries.

    `attempts` limits calls without any output. `resumptions` limits consecutive resumptions without
    progress of a response that has begun. `lost` limits retries after workers died, as the request
    may have caused it.

    A pause is the server's retry delay, at most `MAX_NAP_S`, plus up to a quarter. Without a delay
    from the server, it is `first_pause_s`, doubled up to `last_pause_s`. A longer delay of a server
    is an estimate, so attempts within it, up to `MAX_ASKED_S`, are not counted. No attempt begins
    after the deadline.
    """

    attempts: int = 4
    resumptions: int = 10
    lost: int = 1
    first_pause_s: float = 0.1
    last_pause_s: float = 5.0


DEFAULT_RETRY = Retry()
NO_RETRY = Retry(attempts=1, resumptions=0, lost=0)


class Targets:
    """Rotation over routers, safe to share between threads.

    A router that failed is skipped for a while, unless all have failed.
    """

    def __init__(self, count: int, clock: Clock, rng: random.Random) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._turn = rng.randrange(count)
        self._trusted_at_s = [0.0] * count
        self._suspicion_s = [FIRST_SUSPICION_S] * count

    def __len__(self) -> int:
        return len(self._trusted_at_s)

    def next(self) -> int:
        """Return the index of the router to call."""
        with self._lock:
            now = self._clock.now()
            count = len(self)
            in_turn = [(self._turn + step) % count for step in range(count)]
            chosen = min(in_turn, key=lambda index: max(self._trusted_at_s[index], now))
            self._turn = (chosen + 1) % count
            return chosen

    def answered(self, index: int) -> None:
        """Record that the router responded."""
        with self._lock:
            self._trusted_at_s[index] = 0.0
            self._suspicion_s[index] = FIRST_SUSPICION_S

    def failed(self, index: int, error: BatonError) -> None:
        """Record a failure, if it counts against the router."""
        if not _is_routers_own(error):
            return
        with self._lock:
            asked_s = min(error.retry_after_s or 0.0, MAX_ASKED_S)
            self._trusted_at_s[index] = self._clock.now() + max(self._suspicion_s[index], asked_s)
            self._suspicion_s[index] = min(2 * self._suspicion_s[index], LAST_SUSPICION_S)


class RetryBudget:
    """Retry budget of one call over all its attempts, which end `timeout_s` from now."""

    def __init__(
        self,
        retry: Retry,
        timeout_s: float | None,
        num_targets: int,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._retry = retry
        self._num_targets = num_targets
        self._clock = clock
        self._rng = rng
        self._deadline = None if timeout_s is None else Deadline.after(clock, timeout_s)
        self._has_begun = False
        self._failures = 0  # consecutive, without progress
        self._lost = 0
        # end of the server's retry delay, when a failure was last counted
        self._asked_until_s = -math.inf

    def remaining_s(self) -> float | None:
        """Return the seconds until the deadline, or None without one."""
        return None if self._deadline is None else self._deadline.remaining_s()

    def progressed(self) -> None:
        """Record that new output arrived."""
        self._has_begun = True
        self._failures = 0
        self._asked_until_s = -math.inf

    def pause_after(self, error: BatonError) -> float:
        """Return the seconds until the next attempt, or raise `error` if there is none."""
        self._failures += self._clock.now() >= self._asked_until_s
        self._lost += isinstance(error, PeerLostError | HandoffError)
        most = self._retry.resumptions + 1 if self._has_begun else self._retry.attempts
        if not self._may_help(error) or self._failures >= most or self._lost > self._retry.lost:
            raise error
        pause_s = self._pause_s(error)
        remaining_s = self.remaining_s()
        if remaining_s is not None and pause_s >= remaining_s:
            raise error
        return pause_s

    def _may_help(self, error: BatonError) -> bool:
        if isinstance(error, DuplicateRequestError):
            return (
                self._failures > 1 or self._has_begun
            )  # the request's former attempt, which the router has not ended yet
        return isinstance(error, CapacityError | UnavailableError | HandoffError)

    def _pause_s(self, error: BatonError) -> float:
        if _is_routers_own(error) and self._failures < self._num_targets:
            return self._rng.uniform(0.0, SPREAD_S)  # another router has not been tried yet
        if error.retry_after_s is not None:
            now_s = self._clock.now()
            asked_s = min(error.retry_after_s, MAX_ASKED_S)
            if now_s >= self._asked_until_s:
                self._asked_until_s = now_s + asked_s
            return min(asked_s, MAX_NAP_S) * self._rng.uniform(1.0, 1.0 + MAX_JITTER)
        longest_s = min(
            self._retry.first_pause_s * 2.0 ** (self._failures - 1), self._retry.last_pause_s
        )
        return longest_s * self._rng.uniform(0.5, 1.0)


def _is_routers_own(error: BatonError) -> bool:
    """Return whether another router might succeed at once.

    Full pools and lost workers are the same for all routers.
    """
    return isinstance(error, UnavailableError) and not isinstance(error, PeerLostError)


class AnswerSoFar:
    """Output that has arrived of all choices of one query; each token is delivered once.

    Every event of every attempt passes through `news`.
    """

    def __init__(self, query: Query, new_seed: Callable[[], int]) -> None:
        """Start without output; give a sampled query a seed.

        The next router must sample with the same seed.
        """
        if query.sampling.seed is None and query.sampling.temperature != 0:
            query = replace(query, sampling=replace(query.sampling, seed=new_seed()))
        self._query = query
        self._num_choices = query.n or 1
        self._token_ids = {index: list(token_ids) for index, token_ids in enumerate(query.resumed)}
        self._generated_by = dict(enumerate(query.resumed_from))
        self._finished: set[int] = set()
        self._held: dict[int, list[Chunk]] = {}
        self._num_scored = 1  # prompt positions; the first has no score

    @property
    def is_whole(self) -> bool:
        """Return whether every choice has finished."""
        return len(self._finished) >= self._num_choices

    def query(self) -> Query:
        """Return the query of the next attempt; text that was held back is sent again."""
        self._held.clear()
        if not any(self._token_ids.values()) and not self._generated_by:
            return self._query
        most = max({*self._token_ids, *self._generated_by})
        return replace(
            self._query,
            resumed=tuple(tuple(self._token_ids.get(index, ())) for index in range(most + 1)),
            resumed_from=tuple(self._generated_by.get(index, "") for index in range(most + 1)),
        )

    def news(self, event: Event) -> list[Event]:
        """Return the parts of an event that have not arrived before."""
        index = event.index
        if index in self._finished:
            return []
        if not self._query.request_id:
            self._query = replace(self._query, request_id=event.request_id)
        if not isinstance(event, Chunk):
            self._finished.add(index)
            return [*self._held.pop(index, []), event]
        if event.prompt_logprobs is not None:
            return self._unseen(self._named(event), event.prompt_logprobs)
        if not event.token_ids:
            self._held.setdefault(index, []).append(
                event
            )  # until its finish arrives: see GenerateRequest.resumed
            return []
        is_first = not self._token_ids.get(index)
        self._token_ids.setdefault(index, []).extend(event.token_ids)
        return [self._named(event, is_first=is_first)]

    def _named(self, event: Chunk, *, is_first: bool = False) -> Chunk:
        """Return the event with the workers' name only if it is news or in the first tokens.

        The workers of another router are compatible, under a name of their own.
        """
        if not event.compatibility:
            return event
        is_new = not self._generated_by.get(event.index)
        if is_new:
            self._generated_by[event.index] = event.compatibility
        named = self._generated_by[event.index] if is_new or is_first else ""
        return replace(event, compatibility=named)

    def _unseen(self, event: Chunk, scores: PromptLogprobs) -> list[Event]:
        skipped = max(0, self._num_scored - scores.first_position)
        self._num_scored = max(self._num_scored, scores.first_position + len(scores.token_ids))
        if skipped >= len(scores.token_ids):
            return []
        return [
            replace(
                event,
                prompt_logprobs=PromptLogprobs(
                    scores.first_position + skipped,
                    scores.token_ids[skipped:],
                    scores.logprobs[skipped:],
                ),
            )
        ]


class Attempts:
    """State of one response over all its attempts.

    A client adds only the calls and the pauses.
    """

    def __init__(
        self,
        query: Query,
        retry: Retry,
        turns: Targets,
        *,
        timeout_s: float | None,
        clock: Clock,
        rng: random.Random,
        new_seed: Callable[[], int],
    ) -> None:
        """Start with no attempt made.

        Raises:
            InvalidRequestError: `timeout_s` is not a number.
        """
        self._answer = AnswerSoFar(query, new_seed)
        self._budget = RetryBudget(retry, _checked_timeout(timeout_s), len(turns), clock, rng)
        self._turns = turns
        self._turn = 0

    @property
    def is_whole(self) -> bool:
        return self._answer.is_whole

    def begin(self) -> tuple[int, Query, float | None]:
        """Return the router to call next, the query to send, and the seconds left."""
        self._turn = self._turns.next()
        return self._turn, self._answer.query(), self._budget.remaining_s()

    def news(self, event: Event) -> Iterator[Event]:
        """Yield the parts of an event that have not arrived before."""
        self._turns.answered(self._turn)
        for part in self._answer.news(event):
            self._budget.progressed()
            yield part

    def pause_after(self, error: BatonError) -> float:
        """Return the seconds until the next attempt, or raise `error` if there is none."""
        self._turns.failed(self._turn, error)
        return self._budget.pause_after(error)


def _checked_timeout(timeout_s: float | None) -> float | None:
    """Return the time limit to pass to gRPC, or None if there is none.

    gRPC treats a time that it cannot add to the clock as already over. A limit of more than
    `MAX_TIMEOUT_S` is therefore no limit.

    Raises:
        InvalidRequestError: `timeout_s` is not a number.
    """
    if timeout_s is None or timeout_s > MAX_TIMEOUT_S:
        return None
    if math.isnan(timeout_s):
        raise InvalidRequestError(
            FieldViolation("timeout_s", "must be a number of seconds, got nan")
        )
    return timeout_s


def checked_targets(targets: tuple[str, ...]) -> tuple[str, ...]:
    """Return the targets without duplicates, or raise InvalidRequestError if there are none."""
    if not targets:
        raise InvalidRequestError(FieldViolation("targets", "must name at least one router"))
    return tuple(dict.fromkeys(targets))
