"""Which worker gets a request: pure functions over snapshots. What varies (turn, random source, prompt) is an argument.

Every policy sees only workers that have room and were not tried for this request yet, and breaks ties by address, so
that the same snapshot always gives the same answer.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Policy(StrEnum):
    ROUND_ROBIN = "round_robin"  # everyone in turn
    POWER_OF_TWO = "power_of_two"  # the less loaded of two drawn at random
    LEAST_LOAD = "least_load"  # the least loaded of all
    PREFIX_AFFINITY = "prefix_affinity"  # prompts that begin alike meet, unless their worker is overloaded


# A prompt's first tokens decide where it belongs: enough to distinguish system prompts.
AFFINITY_TOKENS = 256
# An affine worker may be this much busier than the least loaded one before affinity gives way.
AFFINITY_FACTOR = 1.5
AFFINITY_SLACK = 8192.0


@dataclass(frozen=True)
class Candidate:
    """One worker as a policy sees it. Loads compare within one role only: prompt tokens ahead for prefill workers,
    the used share of a pool for decode workers."""

    address: str
    load: float
    has_room: bool = True


@dataclass(frozen=True)
class Draw:
    """What a choice may depend on besides the workers."""

    turn: int  # counts choices, for round robin
    rng: random.Random
    prompt_token_ids: Sequence[int] = ()


def choose(policy: Policy, candidates: Sequence[Candidate], draw: Draw, *,
           tried: frozenset[str] = frozenset()) -> Candidate | None:
    """The worker `policy` picks among those with room that are not in `tried`; None if there is none."""
    eligible = sorted((c for c in candidates if c.has_room and c.address not in tried), key=lambda c: c.address)
    if not eligible:
        return None
    match policy:
        case Policy.ROUND_ROBIN:
            return eligible[draw.turn % len(eligible)]
        case Policy.POWER_OF_TWO:
            return least_loaded(draw.rng.sample(eligible, min(2, len(eligible))))
        case Policy.LEAST_LOAD:
            return least_loaded(eligible)
        case Policy.PREFIX_AFFINITY:
            return _affine(eligible, draw.prompt_token_ids)


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
