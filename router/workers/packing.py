"""Which worker decodes a prompt of a worker that could decode it, too. Pure.

A worker that prefills and decodes alternates chunks and steps: chunks get short, and each delays
the next token of every response there. So requests are decoded together, on as few workers as have
room, and the other workers of both roles prefill at full speed.
"""

from collections.abc import Sequence
from typing import NamedTuple

from router.workers.candidate import Candidate
from router.workers.worker import Worker

# Requests are decoded together up to this share of a worker's capacity.
MOST_PACKED = 0.6
# A prompt is not handed over if that would lengthen its response by this share.
MOST_HANDOFF = 0.1
# How much more a prompt counts on a worker that decodes than on one that does not.
STREAMS_WEIGHT = 4.0


class DecodePlace(NamedTuple):
    """The worker that decodes, and the decision as `baton_placements_total` counts it."""

    pool: Worker
    kind: str
    why: str


def decode_place(
    source: Worker, preferred: Worker, pools: Sequence[Worker], num_tokens: int
) -> DecodePlace:
    """Return where a prompt of `num_tokens` tokens is decoded that `source` prefills.

    `preferred`: the one of `pools` that the policy chose.
    """
    own = next((pool for pool in pools if pool.address == source.address), None)
    if own is None:
        return DecodePlace(preferred, "disaggregated", "roles")
    packed = [pool for pool in pools if _decodes(pool) and _load(pool) < MOST_PACKED]
    if own in packed or (not packed and _load(own) < MOST_PACKED):
        return DecodePlace(own, "aggregated", "no_handoff")
    if not packed:  # every worker is busy
        return DecodePlace(preferred, "aggregated" if preferred is own else "disaggregated", "load")
    pool = max(packed, key=lambda each: (_load(each), each.address))
    if pool.answer_pace.token_share * num_tokens > MOST_HANDOFF:
        return DecodePlace(own, "aggregated", "handoff")
    return DecodePlace(pool, "disaggregated", "streams")


def weighed_sources(
    candidates: Sequence[Candidate], pools: Sequence[Worker], num_tokens: int
) -> Sequence[Candidate]:
    """Return prefill workers as policies see them for a prompt: busier if they decode, too."""
    own = {candidate.address for candidate in candidates}
    decoding = {pool.address for pool in pools if pool.address in own and _decodes(pool)}
    if not decoding:
        return candidates
    more = (STREAMS_WEIGHT - 1) * num_tokens
    return [
        candidate._replace(load=candidate.load * STREAMS_WEIGHT + more)
        if candidate.address in decoding
        else candidate
        for candidate in candidates
    ]


def _load(pool: Worker) -> float:
    return pool.snapshot.candidate.load


def _decodes(pool: Worker) -> bool:
    """Return whether a decode pool has requests, of any router."""
    return pool.num_booked > 0 or pool.load.running_requests > 0
