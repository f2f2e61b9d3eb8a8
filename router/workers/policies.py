"""The placement policies. Pure: all that varies is an argument.

A policy sees only workers that may get the request: the caller leaves out workers without room and
those already tried.
"""

import hashlib
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from router.workers.candidate import Candidate

# Leading prompt tokens that decide the affine worker: enough to distinguish system prompts.
AFFINITY_TOKENS = 256
# An affine worker may be this much busier than the least loaded one before affinity is ignored.
AFFINITY_FACTOR = 1.5
AFFINITY_SLACK = 8192.0


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
        return _only(candidates, [in_order(candidates)[context.turn % len(candidates)]])


class LeastLoadPolicy(PlacementPolicy):
    """The least loaded worker."""

    def costs(self, candidates: Sequence[Candidate], context: PolicyContext) -> Sequence[float]:
        """Implement `PlacementPolicy.costs`."""
        return [candidate.load for candidate in candidates]


class PowerOfTwoPolicy(PlacementPolicy):
    """The less loaded of two random workers."""

    def costs(self, candidates: Sequence[Candidate], context: PolicyContext) -> Sequence[float]:
        """Implement `PlacementPolicy.costs`."""
        pair = context.rng.sample(in_order(candidates), min(2, len(candidates)))
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


def in_order(candidates: Sequence[Candidate]) -> list[Candidate]:
    return sorted(candidates, key=lambda c: c.address)


def _only(candidates: Sequence[Candidate], chosen: Sequence[Candidate]) -> list[float]:
    """Return the loads of the chosen candidates; the cost of the others is infinite."""
    return [candidate.load if candidate in chosen else math.inf for candidate in candidates]
