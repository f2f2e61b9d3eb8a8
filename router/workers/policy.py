"""Placement policies. Pure: all that varies is an argument.

A policy sees only workers that may get the request: the caller leaves out workers without room and
those already tried. The worker with the least cost is chosen, of equals one at random, because
routers with the same information would otherwise all choose the same worker. The same candidates
and random source always give the same result, whatever the order of the candidates.
"""

import hashlib
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from router.workers.candidate import Candidate

# Leading prompt tokens that decide the affine worker: enough to distinguish system prompts.
AFFINITY_TOKENS = 256
# An affine worker may be this much busier than the least loaded one before affinity is ignored.
AFFINITY_FACTOR = 1.5
AFFINITY_SLACK = 8192.0
# Seconds to compute a token and to generate a response, until some were measured.
UNSEEN_TOKEN_S = 1e-4
UNSEEN_ANSWER_S = 5.0


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


class PlacementPolicy(ABC):
    """A criterion for choosing one of several workers.

    Attributes:
        goes_by_load: whether a random sample of workers can stand for all.
        weighs_pairs: whether the costs of a prefill worker and of a pool are added, in seconds.
            Otherwise the prefill worker is chosen first, then one of its pools.
        for_pools: name in `Policy` of the policy for decode pools, if it is another one.
    """

    goes_by_load = True
    weighs_pairs = False
    for_pools = ""

    @abstractmethod
    def costs(self, candidates: Sequence[Candidate], context: PolicyContext) -> Sequence[float]:
        """Return the cost of each candidate; there is at least one."""


class RoundRobinPolicy(PlacementPolicy):
    """Each worker in turn."""

    goes_by_load = False

    def costs(self, candidates: Sequence[Candidate], context: PolicyContext) -> Sequence[float]:
        """Implement `PlacementPolicy.costs`."""
        return _only(candidates, [_in_order(candidates)[context.turn % len(candidates)]])


class LeastLoadPolicy(PlacementPolicy):
    """The least loaded worker."""

    def costs(self, candidates: Sequence[Candidate], context: PolicyContext) -> Sequence[float]:
        """Implement `PlacementPolicy.costs`."""
        return [candidate.load for candidate in candidates]


class PowerOfTwoPolicy(PlacementPolicy):
    """The less loaded of two random workers."""

    def costs(self, candidates: Sequence[Candidate], context: PolicyContext) -> Sequence[float]:
        """Implement `PlacementPolicy.costs`."""
        pair = context.rng.sample(_in_order(candidates), min(2, len(candidates)))
        return _only(candidates, pair)


class PrefixAffinityPolicy(PlacementPolicy):
    """The same worker for prompts with the same beginning, unless it is overloaded.

    The worker is found by rendezvous hashing: it has the highest score of the prompt's head.
    Rendezvous hashing needs no memory, so several routers agree. A worker that joins or leaves
    moves only its own prompts.
    """

    goes_by_load = False
    for_pools = "LEAST_LOAD"  # affinity applies to prefill only

    def costs(self, candidates: Sequence[Candidate], context: PolicyContext) -> Sequence[float]:
        """Implement `PlacementPolicy.costs`."""
        head = b"".join(
            token_id.to_bytes(4, "little")
            for token_id in context.prompt_token_ids[:AFFINITY_TOKENS]
        )
        affine = max(
            candidates,
            key=lambda c: hashlib.blake2b(
                head, key=c.address.encode()[:64], digest_size=8
            ).digest(),
        )
        loads = [candidate.load for candidate in candidates]
        overloaded = affine.load > AFFINITY_FACTOR * min(loads) + AFFINITY_SLACK
        return loads if overloaded else _only(candidates, [affine])


class PrefixCachePolicy(PlacementPolicy):
    """The pair with the shortest wait.

    That is for queued and missing tokens on the prefill worker, for missing pages on the pool, and
    for the other requests there.
    """

    weighs_pairs = True

    def costs(self, candidates: Sequence[Candidate], context: PolicyContext) -> Sequence[float]:
        """Return the load of each worker including the prompt."""
        num_tokens = len(context.prompt_token_ids)
        num_cached = context.num_cached.get
        return [
            load + (num_tokens - num_cached(address, 0)) * token_load
            for address, load, token_load, _ in candidates
        ]


class Policy(StrEnum):
    """Name of a policy in settings, and the policy."""

    ROUND_ROBIN = "round_robin", RoundRobinPolicy()
    POWER_OF_TWO = "power_of_two", PowerOfTwoPolicy()
    LEAST_LOAD = "least_load", LeastLoadPolicy()
    PREFIX_AFFINITY = "prefix_affinity", PrefixAffinityPolicy()
    PREFIX_CACHE = "prefix_cache", PrefixCachePolicy()

    chooser: PlacementPolicy

    def __new__(cls, name: str, chooser: PlacementPolicy) -> "Policy":
        policy = str.__new__(cls, name)
        policy._value_ = name
        policy.chooser = chooser
        return policy

    @property
    def of_pools(self) -> "Policy":
        """Return the policy for decode pools."""
        return Policy[self.chooser.for_pools] if self.chooser.for_pools else self


def choose_pair(
    policy: Policy, groups: Sequence[LinkedWorkers], context: PolicyContext
) -> ChosenPair:
    """Return a prefill worker and one of the pools that it may feed.

    `context` is for the prefill worker. No group may be empty.
    """
    sources = [candidate for group in groups for candidate in group.sources]
    costs = policy.chooser.costs(sources, context)
    of_pools = policy.of_pools.chooser
    if not policy.chooser.weighs_pairs:
        source = _least(sources, costs, context)
        place = _group_of(source, groups)
        pools = groups[place].pools
        pool_costs = of_pools.costs(pools, groups[place].context)
        return ChosenPair(place, source, _least(pools, pool_costs, groups[place].context))
    costs_of_pools = [of_pools.costs(group.pools, group.context) for group in groups]
    if len(groups) > 1:  # with one group, the best source and the best pool are a pair
        source_s = _mean_load_s(sources) or UNSEEN_TOKEN_S
        pool_s = _mean_load_s([pool for group in groups for pool in group.pools]) or UNSEEN_ANSWER_S
        best_pool_s = [
            min(of_group) * pool_s
            for group, of_group in zip(groups, costs_of_pools, strict=True)
            for _ in group.sources
        ]
        costs = [cost * source_s + pool for cost, pool in zip(costs, best_pool_s, strict=True)]
    source = _least(sources, costs, context)
    place = _group_of(source, groups)
    return ChosenPair(
        place, source, _least(groups[place].pools, costs_of_pools[place], groups[place].context)
    )


def choose(
    policy: Policy,
    candidates: Sequence[Candidate],
    context: PolicyContext,
    *,
    tried: frozenset[str] = frozenset(),
) -> Candidate | None:
    """Return the worker that `policy` selects among those not in `tried`; None if there is none."""
    eligible = [c for c in candidates if c.address not in tried]
    return _least(eligible, policy.chooser.costs(eligible, context), context) if eligible else None


def _group_of(source: Candidate, groups: Sequence[LinkedWorkers]) -> int:
    return next(place for place, group in enumerate(groups) if source in group.sources)


def _mean_load_s(candidates: Sequence[Candidate]) -> float:
    """Return the mean `load_s` of the workers that have one; 0 if none has."""
    seen_s = [candidate.load_s for candidate in candidates if candidate.load_s]
    return sum(seen_s) / len(seen_s) if seen_s else 0.0


def _in_order(candidates: Sequence[Candidate]) -> list[Candidate]:
    return sorted(candidates, key=lambda c: c.address)


def _only(candidates: Sequence[Candidate], chosen: Sequence[Candidate]) -> list[float]:
    """Return the loads of the chosen candidates; the cost of the others is infinite."""
    return [candidate.load if candidate in chosen else math.inf for candidate in candidates]


def _least(
    candidates: Sequence[Candidate], costs: Sequence[float], context: PolicyContext
) -> Candidate:
    """Return the candidate with the least cost, a random one of equals."""
    least = min(costs)
    if costs.count(least) == 1:
        return candidates[costs.index(least)]
    equals = [candidate for candidate, cost in zip(candidates, costs, strict=True) if cost == least]
    return context.rng.choice(_in_order(equals))
