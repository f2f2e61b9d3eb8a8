"""Which worker gets a request, which has room, and which pairs cannot hand over. Pure: what varies
(turn, random source, prompt, time) is an argument.

Every policy sees only workers that may get the request: whoever asks leaves out those without room,
and those that were tried for it. Of equals it draws one: routers that know the same of the same
workers would otherwise all take the same one. The same snapshot and random source always give the
same answer, whatever the order of the workers.
"""

import hashlib
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from runtime.clock import Clock


class Policy(StrEnum):
    """By what workers are chosen."""

    ROUND_ROBIN = "round_robin"  # everyone in turn
    POWER_OF_TWO = "power_of_two"  # the less loaded of two drawn at random
    LEAST_LOAD = "least_load"  # the least loaded of all
    PREFIX_AFFINITY = (
        "prefix_affinity"  # prompts that begin alike meet, unless their worker is overloaded
    )
    PREFIX_CACHE = "prefix_cache"  # the pair with the least to compute, to send and to wait for

    @property
    def of_pools(self) -> "Policy":
        """How decode pools are chosen: affinity says where prompts are computed, and no more."""
        return Policy.LEAST_LOAD if self is Policy.PREFIX_AFFINITY else self

    @property
    def goes_by_load(self) -> bool:
        """Whether some workers drawn at random can stand for all."""
        return self not in (Policy.ROUND_ROBIN, Policy.PREFIX_AFFINITY)


# A prompt's first tokens decide where it belongs: enough to distinguish system prompts.
AFFINITY_TOKENS = 256
# An affine worker may be this much busier than the least loaded one before affinity gives way.
AFFINITY_FACTOR = 1.5
AFFINITY_SLACK = 8192.0
UNSEEN_TOKEN_S, UNSEEN_ANSWER_S = (
    1e-4,
    5.0,
)  # to compute a token, to draw an answer: until some were seen
SEVERED_MEMORY_S = 30.0
MAX_SEVERED_PAIRS = 4096
# Beside a prompt that is so many times as long, others do not wait for it: one token in
# `SHORT_SHARE` is theirs.
SHORT_RATIO, SHORT_SHARE = 4, 4


class Candidate(NamedTuple):
    """One worker as a policy sees it. Loads compare within one role only: prompt tokens ahead for
    prefill workers, the used share of a pool for decode workers. `token_load`: what a token that it
    lacks adds to its load, its way there included. `load_s`: the seconds that one more of load
    takes a request, 0 before any were seen."""

    address: str
    load: float
    token_load: float = 1.0
    load_s: float = 0.0


class WorkerSnapshot(NamedTuple):
    """What a choice goes by, as of a worker's last report or booking. `longest`: tokens of a
    sequence that it can hold, below 0 while it cannot be used. `candidate`: as policies see it.
    `has_place`: a prefill worker would queue one more prompt, a decode pool is given one more
    request. `tokens_left`: of a request that it would take; those in free pages of a decode pool,
    -1 without a place. `prompts_ahead`: tokens of each prompt of a prefill worker that is busy, of
    which `busy_tokens` are enough; `tokens_ahead` are all of them, `longest_ahead` the longest."""

    longest: float
    compatibility: str
    page_size: int
    candidate: Candidate
    has_place: bool
    tokens_left: float
    prompts_ahead: tuple[int, ...] = ()
    busy_tokens: float = math.inf
    tokens_ahead: int = 0
    longest_ahead: int = 0

    def has_room(self, num_tokens: int, context_tokens: int = 0) -> bool:
        """For a prompt of so many tokens; `context_tokens` as for `Worker.book`."""
        if self.prompts_ahead:
            if self.busy_tokens > self.tokens_ahead:
                return self.has_place
            most = SHORT_RATIO * num_tokens
            if not self.has_place or most >= self.longest_ahead:
                return False
            # The much longer ones take their part of the tokens only while there are short ones,
            # too.
            short = [ahead for ahead in self.prompts_ahead if ahead < most]
            longer = most * (len(self.prompts_ahead) - len(short))
            return self.busy_tokens > sum(short) + min(longer, (SHORT_SHARE - 1) * sum(short))
        # The most that is reserved, first: this is asked of every worker for every choice.
        return (
            num_tokens + self.page_size <= self.tokens_left
            or reserved_tokens(num_tokens, context_tokens, self.page_size) <= self.tokens_left
        )


def reserved_tokens(num_tokens: int, context_tokens: int, page_size: int) -> int:
    """What a decode pool reserves pages for: the prompt and a page's growth, but no more than the
    request may come to."""
    grown = num_tokens + page_size
    return (
        grown if not context_tokens or grown <= context_tokens else max(num_tokens, context_tokens)
    )


@dataclass(frozen=True)
class PolicyContext:
    """What a choice may depend on besides the workers. `num_held`: tokens of the prompt that a
    worker need not compute, or be sent, by its address, as it reported of its prefix cache."""

    turn: int  # counts choices, for round robin
    rng: random.Random
    prompt_token_ids: Sequence[int] = ()
    num_held: Mapping[str, int] = field(default_factory=dict)


class LinkedWorkers(NamedTuple):
    """Prefill workers, each of which may feed each of these decode pools; some of both. `context` is
    for the pools."""

    sources: Sequence[Candidate]
    pools: Sequence[Candidate]
    context: PolicyContext


class ChosenPair(NamedTuple):
    """`group`: the place, among those there were to choose from, of the group that the two are
    of."""

    group: int
    source: Candidate
    pool: Candidate


def choose_pair(
    policy: Policy, groups: Sequence[LinkedWorkers], context: PolicyContext
) -> ChosenPair:
    """A prefill worker and one of the pools that it may feed; `context` is for the former. Every group
    has some of both.

    With `PREFIX_CACHE` the pair on which the request waits least: for tokens ahead of it and those
    that the worker lacks, for bytes that the pool lacks, and for the others there. Any other policy
    chooses one after the other.
    """
    sources = [candidate for group in groups for candidate in group.sources]
    if policy is not Policy.PREFIX_CACHE:
        source = _pick(policy, sources, context)
        place = _group_of(source, groups)
        return ChosenPair(
            place, source, _pick(policy.of_pools, groups[place].pools, groups[place].context)
        )
    loads, pool_loads = (
        _loads_with(sources, context),
        [_loads_with(group.pools, group.context) for group in groups],
    )
    if len(groups) > 1:  # else what is best of either is best of both
        source_s = _mean_load_s(sources) or UNSEEN_TOKEN_S
        pool_s = _mean_load_s([pool for group in groups for pool in group.pools]) or UNSEEN_ANSWER_S
        best_pool_s = [
            min(of_group) * pool_s
            for group, of_group in zip(groups, pool_loads, strict=True)
            for _ in group.sources
        ]
        loads = [load * source_s + pool for load, pool in zip(loads, best_pool_s, strict=True)]
    source = _least(sources, loads, context)
    place = _group_of(source, groups)
    return ChosenPair(
        place, source, _least(groups[place].pools, pool_loads[place], groups[place].context)
    )


def _group_of(source: Candidate, groups: Sequence[LinkedWorkers]) -> int:
    return next(place for place, group in enumerate(groups) if source in group.sources)


def choose(
    policy: Policy,
    candidates: Sequence[Candidate],
    context: PolicyContext,
    *,
    tried: frozenset[str] = frozenset(),
) -> Candidate | None:
    """The worker `policy` picks among those that are not in `tried`; None if there is none."""
    eligible = [c for c in candidates if c.address not in tried]
    return _pick(policy, eligible, context) if eligible else None


def _pick(policy: Policy, eligible: Sequence[Candidate], context: PolicyContext) -> Candidate:
    match policy:
        case Policy.ROUND_ROBIN:
            return _in_order(eligible)[context.turn % len(eligible)]
        case Policy.POWER_OF_TWO:
            return _least_loaded(
                context.rng.sample(_in_order(eligible), min(2, len(eligible))), context
            )
        case Policy.LEAST_LOAD:
            return _least_loaded(eligible, context)
        case Policy.PREFIX_AFFINITY:
            return _affine(eligible, context)
        case Policy.PREFIX_CACHE:
            return _least(eligible, _loads_with(eligible, context), context)


def _loads_with(candidates: Sequence[Candidate], context: PolicyContext) -> list[float]:
    """Once the prompt is there."""
    num_tokens, num_held = len(context.prompt_token_ids), context.num_held.get
    return [
        load + (num_tokens - num_held(address, 0)) * token_load
        for address, load, token_load, _ in candidates
    ]


def _mean_load_s(candidates: Sequence[Candidate]) -> float:
    """Of those where it was seen."""
    seen_s = [candidate.load_s for candidate in candidates if candidate.load_s]
    return sum(seen_s) / len(seen_s) if seen_s else 0.0


def _in_order(candidates: Sequence[Candidate]) -> list[Candidate]:
    return sorted(candidates, key=lambda c: c.address)


def _least_loaded(candidates: Sequence[Candidate], context: PolicyContext) -> Candidate:
    return _least(candidates, [candidate.load for candidate in candidates], context)


def _least(
    candidates: Sequence[Candidate], loads: Sequence[float], context: PolicyContext
) -> Candidate:
    """The one with the least of these loads, any of them among equals."""
    least = min(loads)
    if loads.count(least) == 1:
        return candidates[loads.index(least)]
    equals = [candidate for candidate, load in zip(candidates, loads, strict=True) if load == least]
    return context.rng.choice(_in_order(equals))


def _affine(candidates: Sequence[Candidate], context: PolicyContext) -> Candidate:
    """Rendezvous hashing: every worker scores the prompt's head and the highest score wins.

    It needs no memory, so several routers agree, and a worker that comes or goes moves only its own
    prompts.
    """
    head = b"".join(
        token_id.to_bytes(4, "little") for token_id in context.prompt_token_ids[:AFFINITY_TOKENS]
    )
    affine = max(
        candidates,
        key=lambda c: hashlib.blake2b(head, key=c.address.encode()[:64], digest_size=8).digest(),
    )
    least = _least_loaded(candidates, context)
    overloaded = affine.load > AFFINITY_FACTOR * least.load + AFFINITY_SLACK
    return least if overloaded else affine


class FailedLinks:
    """Pairs of workers that lately could not hand a prompt over though both live: the link between
    their hosts fails, which neither shows to the router. Kept for a while, since nothing shows when
    such a link is mended.

    By incarnations: a worker that has started anew is another one.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until_s: dict[tuple[str, str], float] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._until_s)

    def add(self, source: str, pool: str) -> None:
        """A handoff from this prefill worker to this pool failed. Where there are too many, the
        oldest pair goes."""
        self.remove(source, pool)
        if len(self._until_s) >= MAX_SEVERED_PAIRS:
            del self._until_s[next(iter(self._until_s))]
        self._until_s[source, pool] = self._clock.now() + SEVERED_MEMORY_S

    def remove(self, source: str, pool: str) -> None:
        """One succeeded."""
        self._until_s.pop((source, pool), None)

    def by_source(self) -> dict[str, set[str]]:
        """The pools of each source that has some."""
        now_s, found = self._clock.now(), dict[str, set[str]]()
        for (source, pool), until_s in self._until_s.items():
            if now_s < until_s:
                found.setdefault(source, set()).add(pool)
        return found
