"""Which worker gets a request, which pairs cannot hand over, and how fast workers are. Pure: what varies (turn, random
source, prompt, time) is an argument.

Every policy sees only workers that have room and were not tried for this request yet, and breaks ties by address, so
that the same snapshot always gives the same answer.

Speed is measured from what the router sees. It is weighed the less the older it is, and what was not confirmed for
a while is dropped: a pool that was slow once would otherwise get nothing by which it could show that it is not any
more.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from runtime.clock import Clock
from runtime.pace import MIN_TOKENS


class Policy(StrEnum):
    ROUND_ROBIN = "round_robin"  # everyone in turn
    POWER_OF_TWO = "power_of_two"  # the less loaded of two drawn at random
    LEAST_LOAD = "least_load"  # the least loaded of all
    PREFIX_AFFINITY = "prefix_affinity"  # prompts that begin alike meet, unless their worker is overloaded
    PREFIX_CACHE = "prefix_cache"  # the least load once the prompt is there, of which it may have a part already


# A prompt's first tokens decide where it belongs: enough to distinguish system prompts.
AFFINITY_TOKENS = 256
# An affine worker may be this much busier than the least loaded one before affinity gives way.
AFFINITY_FACTOR = 1.5
AFFINITY_SLACK = 8192.0
HALF_LIFE_S = 5.0  # of busy time
MIN_PROMPTS = 3  # one alone may have met a cold start
MEMORY_S = 30.0
KEPT_SHARE = 0.9  # of what came before, per answer
SEVERED_MEMORY_S = 30.0
MAX_SEVERED_PAIRS = 4096


class Candidate(NamedTuple):
    """One worker as a policy sees it. Loads compare within one role only: prompt tokens ahead for prefill workers,
    the used share of a pool for decode workers. `num_held`: tokens of the prompt that it need not compute, or be sent,
    by what it reported of its prefix cache; `token_load`: what a token adds to its load."""

    address: str
    load: float
    has_room: bool = True
    num_held: int = 0
    token_load: float = 1.0


@dataclass(frozen=True)
class Draw:
    """What a choice may depend on besides the workers."""

    turn: int  # counts choices, for round robin
    rng: random.Random
    prompt_token_ids: Sequence[int] = ()


def choose(policy: Policy, candidates: Sequence[Candidate], draw: Draw, *,
           tried: frozenset[str] = frozenset()) -> Candidate | None:
    """The worker `policy` picks among those with room that are not in `tried`; None if there is none."""
    eligible = [c for c in candidates if c.has_room and c.address not in tried]
    if not eligible:
        return None
    match policy:
        case Policy.ROUND_ROBIN:
            return _in_order(eligible)[draw.turn % len(eligible)]
        case Policy.POWER_OF_TWO:
            return least_loaded(draw.rng.sample(_in_order(eligible), min(2, len(eligible))))
        case Policy.LEAST_LOAD:
            return least_loaded(eligible)
        case Policy.PREFIX_AFFINITY:
            return _affine(eligible, draw.prompt_token_ids)
        case Policy.PREFIX_CACHE:
            # All lack the rest of the prompt.
            return min(eligible, key=lambda c: (c.load - c.num_held * c.token_load, c.address))


def _in_order(candidates: Sequence[Candidate]) -> list[Candidate]:
    return sorted(candidates, key=lambda c: c.address)


def least_loaded(candidates: Sequence[Candidate]) -> Candidate:
    """The one with the least load, the lowest address among equals."""
    return min(candidates, key=lambda c: (c.load, c.address))


def _affine(candidates: Sequence[Candidate], prompt_token_ids: Sequence[int]) -> Candidate:
    """Rendezvous hashing: every worker scores the prompt's head and the highest score wins.

    It needs no memory, so several routers agree, and a worker that comes or goes moves only its own prompts.
    """
    head = b"".join(token_id.to_bytes(4, "little") for token_id in prompt_token_ids[:AFFINITY_TOKENS])
    affine = max(candidates, key=lambda c: hashlib.blake2b(head, key=c.address.encode()[:64], digest_size=8).digest())
    least = least_loaded(candidates)
    overloaded = affine.load > AFFINITY_FACTOR * least.load + AFFINITY_SLACK
    return least if overloaded else affine


class SeveredPairs:
    """Pairs of workers that lately could not hand a prompt over though both live: the link between their hosts fails,
    which neither shows to the router. Kept for a while, since nothing tells when such a link is mended.

    By incarnations: a worker that has started anew is another one.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until_s: dict[tuple[str, str], float] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._until_s)

    def add(self, source: str, pool: str) -> None:
        """A handoff from this prefill worker to this pool failed. Where there are too many, the oldest pair goes."""
        self.remove(source, pool)
        if len(self._until_s) >= MAX_SEVERED_PAIRS:
            del self._until_s[next(iter(self._until_s))]
        self._until_s[source, pool] = self._clock.now() + SEVERED_MEMORY_S

    def remove(self, source: str, pool: str) -> None:
        """One succeeded."""
        self._until_s.pop((source, pool), None)

    def has(self, source: str, pool: str) -> bool:
        """Whether this pair is one of them."""
        return self._clock.now() < self._until_s.get((source, pool), 0.0)


@dataclass
class PrefillPace:
    """Prompt tokens per second of a pool while it has prompts to compute: under load that is its throughput, else the
    speed of single prompts. Time without prompts does not count."""

    clock: Clock
    num_computing: int = 0
    _tokens: float = 0.0
    _busy_s: float = 0.0
    _num_prompts: int = 0
    _counted_until_s: float = 0.0

    def began(self) -> None:
        """The pool was given a prompt."""
        self._count_time()
        self.num_computing += 1

    def ended(self, num_tokens: int) -> None:
        """A prompt was computed, so many tokens of it; 0: it was given up. Few tokens count as `MIN_TOKENS`: most of
        their time is none of theirs, and a prompt that no cache has would seem to take for ever."""
        self._count_time()
        self.num_computing = max(0, self.num_computing - 1)
        self._tokens += max(num_tokens, MIN_TOKENS) if num_tokens else 0
        self._num_prompts += num_tokens > 0

    def restarted(self) -> None:
        """The pool started anew: what it was given is gone."""
        self._count_time()
        self.num_computing = 0

    @property
    def tokens_per_s(self) -> float | None:
        """None until a few prompts were computed."""
        self._count_time()
        return self._tokens / self._busy_s if self._num_prompts >= MIN_PROMPTS and self._busy_s > 0 else None

    def _count_time(self) -> None:
        now = self.clock.now()
        if self.num_computing:
            passed_s = now - self._counted_until_s
            kept = 0.5 ** (passed_s / HALF_LIFE_S)
            self._tokens *= kept
            self._busy_s = self._busy_s * kept + passed_s
        self._counted_until_s = now


@dataclass
class _Sample:
    """Weighed sums over the answers of one load."""

    tokens: float = 0.0
    seconds: float = 0.0
    seen_s: float = 0.0


@dataclass
class DecodePace:
    """Time between two tokens of one answer by how many requests share the pool. Loads of one power of two are one."""

    clock: Clock
    _by_load: dict[int, _Sample] = field(default_factory=dict)

    def observe(self, num_requests: int, num_tokens: int, seconds: float) -> None:
        """An answer got `num_tokens` in so many seconds beside `num_requests`, itself included."""
        if num_tokens < 1 or seconds <= 0:
            return
        sample = self._by_load.setdefault(max(1, num_requests).bit_length(), _Sample())
        sample.tokens = sample.tokens * KEPT_SHARE + num_tokens
        sample.seconds = sample.seconds * KEPT_SHARE + seconds
        sample.seen_s = self.clock.now()

    def token_s(self, num_requests: int) -> float | None:
        """At this load, or at the nearest lower one that was seen lately, which promises rather too much; without any
        at the nearest higher one. None when nothing was seen."""
        oldest_s = self.clock.now() - MEMORY_S
        known = sorted(load for load, sample in self._by_load.items() if sample.seen_s >= oldest_s)
        if not known:
            return None
        wanted = max(1, num_requests).bit_length()
        sample = self._by_load[max((load for load in known if load <= wanted), default=known[0])]
        return sample.seconds / sample.tokens
