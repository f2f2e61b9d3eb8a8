"""The choice of workers by a placement policy. Pure: all that varies is an argument.

The worker with the least cost is chosen, of equals one at random, because routers with the same
information would otherwise all choose the same worker. The same candidates and random source always
give the same result, whatever the order of the candidates.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from router.workers.candidate import Candidate
from router.workers.policies import (
    LeastLoadPolicy,
    PlacementPolicy,
    PolicyContext,
    PowerOfTwoPolicy,
    PrefixAffinityPolicy,
    PrefixCachePolicy,
    RoundRobinPolicy,
    in_order,
)

# Seconds to compute a token and to generate a response, until some were measured.
UNSEEN_TOKEN_S = 1e-4
UNSEEN_ANSWER_S = 5.0


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


def _least(
    candidates: Sequence[Candidate], costs: Sequence[float], context: PolicyContext
) -> Candidate:
    """Return the candidate with the least cost, a random one of equals."""
    least = min(costs)
    if costs.count(least) == 1:
        return candidates[costs.index(least)]
    equals = [candidate for candidate, cost in zip(candidates, costs, strict=True) if cost == least]
    return context.rng.choice(in_order(equals))
