"""How the leaders of two pools agree: the destination makes the destination terms, the source checks it."""

from collections.abc import Sequence
from dataclasses import replace

from engine.memory.layout import CacheSpec
from runtime.errors import IncompatiblePeerError
from transfer.plan.copy_plan import CopyPlan
from transfer.plan.handoff_terms import DestinationTerms, SourceTerms, StageEndpoint
from transfer.transport.protocol import TAG_OFFSET_BITS

MAX_EPOCH = 255
NONCE_BITS = 32


def plan_destination(source: SourceTerms, *, session_id: str, epoch: int, nonce: int, page_ids: Sequence[int],
                     slot_id: int, stages: Sequence[StageEndpoint], specs: Sequence[CacheSpec],
                     with_draft: bool = False) -> DestinationTerms:
    """The destination's answer to `source`.

    `nonce` is random, 32 bits, drawn once per session; with the epoch it makes the tags nobody else uses. `page_ids`
    are the prompt's pages only (growth is not handed over). `specs` covers the whole model.

    Raises:
        IncompatiblePeerError: the two sides do not fit together.
        ValueError: nonce or epoch out of range.
    """
    if not 0 <= nonce < 1 << NONCE_BITS:
        raise ValueError(f"nonce must have {NONCE_BITS} bits, got {nonce:#x}")
    if not 0 <= epoch <= MAX_EPOCH:
        raise ValueError(f"epoch must be in 0..{MAX_EPOCH}, got {epoch}")
    tag_base = (nonce << 32) | (epoch << TAG_OFFSET_BITS)
    destination = DestinationTerms(session_id, epoch, tag_base, tuple(page_ids), slot_id, tuple(stages), plan_digest="",
                                   with_draft=with_draft)
    return replace(destination, plan_digest=CopyPlan(source, destination, specs).digest)


def check_plan(source: SourceTerms, destination: DestinationTerms, specs: Sequence[CacheSpec]) -> CopyPlan:
    """The plan both sides have agreed on.

    Raises:
        IncompatiblePeerError: this side derives another plan than the one the destination terms were made for.
    """
    plan = CopyPlan(source, destination, specs)
    if plan.digest != destination.plan_digest:
        raise IncompatiblePeerError(f"session {destination.session_id}: this side derives copy plan {plan.digest}, "
                                    f"the destination terms were made for {destination.plan_digest or 'none'}")
    return plan
