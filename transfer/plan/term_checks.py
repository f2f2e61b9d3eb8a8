"""The checks of both sides' terms of a handoff, before the copy plan is derived from them."""

from collections import Counter
from collections.abc import Sequence

from engine.core.layer_range import TensorRank
from engine.memory.layout import CacheSpec
from runtime.errors import ConfigError, IncompatiblePeerError
from transfer.plan.handoff_terms import DestinationTerms, SourceTerms, StageEndpoint

_MAX_SHOWN = 64  # stages in a message


def check_pages(source: SourceTerms, destination: DestinationTerms) -> None:
    num_pages = -(-source.num_tokens // source.page_size)
    for side, page_ids in (("source", source.page_ids), ("destination", destination.page_ids)):
        if len(page_ids) != num_pages:
            raise IncompatiblePeerError(
                f"{side}.page_ids: {source.num_tokens} tokens in pages of {source.page_size} "
                f"need {num_pages} pages, got {len(page_ids)}"
            )
        if len(set(page_ids)) != len(page_ids):
            raise IncompatiblePeerError(f"{side}.page_ids names a page twice")
        if min(page_ids) < 1:
            raise IncompatiblePeerError(
                f"{side}.page_ids names page {min(page_ids)}; pages start at 1"
            )


def check_content(source: SourceTerms, num_tokens: int, content: bytes) -> None:
    """Check that the source offers the state of these tokens, and not of others.

    A mix-up of two requests anywhere before would make one the other's answer.

    Raises:
        IncompatiblePeerError: it does not.
    """
    if source.num_tokens != num_tokens:
        raise IncompatiblePeerError(
            f"source.num_tokens: {source.num_tokens} differs from the prompt's {num_tokens} tokens"
        )
    if source.content != content:
        raise IncompatiblePeerError(
            f"source.content is {source.content[:16].hex() or 'empty'}, not {content.hex()}: it offers "
            "other tokens than those of the request"
        )


def check_held(source: SourceTerms, destination: DestinationTerms) -> None:
    held = destination.held_tokens
    if held % source.page_size or held >= source.num_tokens:
        raise IncompatiblePeerError(
            f"destination.held_tokens is {held}; it must be whole pages of {source.page_size} "
            f"tokens and fewer than the {source.num_tokens} of the prompt"
        )
    if held and not source.sends_rest:
        raise IncompatiblePeerError(
            f"destination.held_tokens is {held}, and the source sends every page"
        )


def check_slots(
    source: SourceTerms, destination: DestinationTerms, specs: Sequence[CacheSpec]
) -> None:
    if all(spec.kind.is_paged for spec in specs):
        return
    for side, slot_id in (("source", source.slot_id), ("destination", destination.slot_id)):
        if slot_id < 1:
            raise IncompatiblePeerError(
                f"{side}.slot_id is {slot_id}; slots of recurrent state start at 1"
            )


def check_layers(side: str, stages: Sequence[StageEndpoint], specs: Sequence[CacheSpec]) -> None:
    """Check that every caching layer is on exactly one stage, and divided between its ranks."""
    sizes = {stage.tensor.size for stage in stages}
    if len(sizes) != 1:
        raise IncompatiblePeerError(
            f"{side}.stages have different numbers of ranks (--tp): {sorted(sizes)}"
        )
    if (size := sizes.pop()) > len(stages):
        raise IncompatiblePeerError(
            f"{side}.stages: {len(stages)} processes cannot be {size} ranks (--tp) of a stage"
        )
    for layer_id in sorted({spec.layer_id for spec in specs}):
        owners = Counter(stage.tensor.rank for stage in stages if layer_id in stage.layers)
        wrong = [rank for rank in range(size) if owners[rank] != 1]
        if wrong:
            found = ", ".join(
                f"{stage.layers}" + (f" (rank {stage.tensor.rank})" if size > 1 else "")
                for stage in stages[:_MAX_SHOWN]
            )
            raise IncompatiblePeerError(
                f"{side}.stages {found}: layer {layer_id} is on {owners[wrong[0]]} stages, "
                f"not on one"
            )
    if size == 1:
        return
    forms = {(spec.kind, spec.blocks): spec for spec in specs if spec.split_axis is not None}
    for spec in forms.values():
        try:
            spec.parts(TensorRank(0, size))
        except ConfigError as error:
            raise IncompatiblePeerError(f"{side}.stages: {error}") from None
