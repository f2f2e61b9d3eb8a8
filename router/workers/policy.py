"""Placement policies, capacity checks, and failed links. Pure: all that varies is an argument.

A policy sees only workers that may get the request: the caller leaves out workers without room and
those already tried. Of equals it chooses one at random, because routers with the same information
would otherwise all choose the same worker. The same snapshot and random source always give the same
result, whatever the order of the workers.
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
    """Criterion for choosing workers."""

    ROUND_ROBIN = "round_robin"  # each worker in turn
    POWER_OF_TWO = "power_of_two"  # the less loaded of two random workers
    LEAST_LOAD = "least_load"  # the least loaded worker
    # The same worker for prompts with the same beginning, unless it is overloaded.
    PREFIX_AFFINITY = "prefix_affinity"
    PREFIX_CACHE = "prefix_cache"  # the pair with the least to compute, to send and to wait for

    @property
    def of_pools(self) -> "Policy":
        """Return the policy for decode pools: affinity applies to prefill only."""
        return Policy.LEAST_LOAD if self is Policy.PREFIX_AFFINITY else self

    @property
    def goes_by_load(self) -> bool:
        """Return whether a random sample of workers can stand for all."""
        return self not in (Policy.ROUND_ROBIN, Policy.PREFIX_AFFINITY)


# Leading prompt tokens that decide the affine worker: enough to distinguish system prompts.
AFFINITY_TOKENS = 256
# An affine worker may be this much busier than the least loaded one before affinity is ignored.
AFFINITY_FACTOR = 1.5
AFFINITY_SLACK = 8192.0
# Seconds to compute a token and to generate a response, until some were measured.
UNSEEN_TOKEN_S = 1e-4
UNSEEN_ANSWER_S = 5.0
SEVERED_MEMORY_S = 30.0
MAX_SEVERED_PAIRS = 4096
# A prompt does not wait for one at least this many times as long: it gets one token in
# `SHORT_SHARE` meanwhile.
SHORT_RATIO = 4
SHORT_SHARE = 4


class Candidate(NamedTuple):
    """One worker as a policy sees it.

    Loads compare within one role only: queued prompt tokens for prefill workers, the used share of
    a pool for decode workers. `token_load` is the load added by each token that the worker lacks,
    transfer included. `load_s` is the time in seconds that one more unit of load costs a request, 0
    before a measurement.
    """

    address: str
    load: float
    token_load: float = 1.0
    load_s: float = 0.0


class WorkerSnapshot(NamedTuple):
    """Immutable view of a worker used for placement, as of its last report or booking.

    `longest` is the sequence length that it can hold, in tokens, below 0 while it is unusable.
    `candidate` is the worker as policies see it. `has_place` means that a prefill worker would
    queue one more prompt, or that a decode pool is given one more request. `tokens_left` is the
    largest request it would accept: the tokens in free pages of a decode pool, -1 without a place.
    `prompts_ahead` are the tokens of each queued prompt of a busy prefill worker, for which
    `busy_tokens` are enough work; `tokens_ahead` is their sum, `longest_ahead` the longest.
    """

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
        """Return whether a prompt of `num_tokens` fits; `context_tokens` as for `Worker.book`."""
        if self.prompts_ahead:
            if self.busy_tokens > self.tokens_ahead:
                return self.has_place
            most = SHORT_RATIO * num_tokens
            if not self.has_place or most >= self.longest_ahead:
                return False
            # Much longer prompts take their share of tokens only while short ones are queued.
            short = [ahead for ahead in self.prompts_ahead if ahead < most]
            longer = most * (len(self.prompts_ahead) - len(short))
            return self.busy_tokens > sum(short) + min(longer, (SHORT_SHARE - 1) * sum(short))
        # The upper bound of the reservation is compared first: every choice asks every worker.
        return (
            num_tokens + self.page_size <= self.tokens_left
            or reserved_tokens(num_tokens, context_tokens, self.page_size) <= self.tokens_left
        )


def reserved_tokens(num_tokens: int, context_tokens: int, page_size: int) -> int:
    """Return the tokens for which a decode pool reserves pages.

    That is the prompt and one page of growth, but at most the request's maximum length.
    """
    grown = num_tokens + page_size
    return (
        grown if not context_tokens or grown <= context_tokens else max(num_tokens, context_tokens)
    )


@dataclass(frozen=True)
class PolicyContext:
    """Inputs of a policy besides the candidates.

    `num_cached`: prompt tokens that a worker neither computes nor receives, by address, as it
    reported of its prefix cache.
    """

    turn: int  # number of choices so far, for round robin
    rng: random.Random
    prompt_token_ids: Sequence[int] = ()
    num_cached: Mapping[str, int] = field(default_factory=dict)


class LinkedWorkers(NamedTuple):
    """Prefill workers, each of which may feed each of these decode pools; neither is empty.

    `context` is for the pools.
    """

    sources: Sequence[Candidate]
    pools: Sequence[Candidate]
    context: PolicyContext


class ChosenPair(NamedTuple):
    """A chosen pair. `group`: index of the pair's group among those given."""

    group: int
    source: Candidate
    pool: Candidate


def choose_pair(
    policy: Policy, groups: Sequence[LinkedWorkers], context: PolicyContext
) -> ChosenPair:
    """Return a prefill worker and one of the pools that it may feed.

    `context` is for the prefill worker. No group may be empty. `PREFIX_CACHE` chooses the pair with
    the shortest wait: for queued and missing tokens on the prefill worker, for missing pages on the
    pool, and for the other requests there. Any other policy chooses one after the other.
    """
    sources = [candidate for group in groups for candidate in group.sources]
    if policy is not Policy.PREFIX_CACHE:
        source = _pick(policy, sources, context)
        place = _group_of(source, groups)
        return ChosenPair(
            place, source, _pick(policy.of_pools, groups[place].pools, groups[place].context)
        )
    loads = _loads_with(sources, context)
    pool_loads = [_loads_with(group.pools, group.context) for group in groups]
    if len(groups) > 1:  # with one group, the best source and the best pool are a pair
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
    """Return the worker that `policy` selects among those not in `tried`; None if there is none."""
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
    """Return the load of each worker including the prompt."""
    num_tokens = len(context.prompt_token_ids)
    num_cached = context.num_cached.get
    return [
        load + (num_tokens - num_cached(address, 0)) * token_load
        for address, load, token_load, _ in candidates
    ]


def _mean_load_s(candidates: Sequence[Candidate]) -> float:
    """Return the mean `load_s` of the workers that have one; 0 if none has."""
    seen_s = [candidate.load_s for candidate in candidates if candidate.load_s]
    return sum(seen_s) / len(seen_s) if seen_s else 0.0


def _in_order(candidates: Sequence[Candidate]) -> list[Candidate]:
    return sorted(candidates, key=lambda c: c.address)


def _least_loaded(candidates: Sequence[Candidate], context: PolicyContext) -> Candidate:
    return _least(candidates, [candidate.load for candidate in candidates], context)


def _least(
    candidates: Sequence[Candidate], loads: Sequence[float], context: PolicyContext
) -> Candidate:
    """Return the candidate with the least load, a random one of equals."""
    least = min(loads)
    if loads.count(least) == 1:
        return candidates[loads.index(least)]
    equals = [candidate for candidate, load in zip(candidates, loads, strict=True) if load == least]
    return context.rng.choice(_in_order(equals))


def _affine(candidates: Sequence[Candidate], context: PolicyContext) -> Candidate:
    """Return the affine worker by rendezvous hashing: the worker with the highest score of the
    prompt's head.

    Rendezvous hashing needs no memory, so several routers agree. A worker that joins or leaves
    moves only its own prompts.
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
    """Pairs of live workers that recently failed a handoff.

    The link between their hosts fails, which neither worker shows to the router. An entry is kept
    for a while, since no report shows when such a link is repaired.

    Entries are by incarnation: a restarted worker is another worker.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._expires_s: dict[tuple[str, str], float] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._expires_s)

    def add(self, source: str, pool: str) -> None:
        """Record a failed handoff from this prefill worker to this pool; drop the oldest entry if
        too many.
        """
        self.remove(source, pool)
        if len(self._expires_s) >= MAX_SEVERED_PAIRS:
            del self._expires_s[next(iter(self._expires_s))]
        self._expires_s[source, pool] = self._clock.now() + SEVERED_MEMORY_S

    def remove(self, source: str, pool: str) -> None:
        """Remove a pair after a successful handoff."""
        self._expires_s.pop((source, pool), None)

    def by_source(self) -> dict[str, set[str]]:
        """Return the pools with a failed link, by source."""
        now_s = self._clock.now()
        found = dict[str, set[str]]()
        for (source, pool), expires_s in self._expires_s.items():
            if now_s < expires_s:
                found.setdefault(source, set()).add(pool)
        return found
