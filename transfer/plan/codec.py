"""Conversion of handoff values to and from protobuf messages.

Invalid values of a peer are rejected here by field.
"""

from collections.abc import Sequence

from engine.core.layer_range import LayerRange, TensorRank
from protos import pipeline_pb2, transfer_pb2
from runtime.errors import FieldViolation, IncompatiblePeerError, InvalidRequestError
from runtime.rpc.message_bounds import MAX_STAGES
from transfer.plan.handoff_terms import (
    DestinationTerms,
    SourceTerms,
    StageEndpoint,
    StageSessionEvent,
    StageSessionState,
)
from transfer.transport.authenticator import KEY_BYTES

MAX_ID_CHARS = 64  # of sessions
MAX_TEXT_CHARS = 8192  # of a pool's compatibility
_STATE_TO_WIRE = {
    StageSessionState.OPEN: pipeline_pb2.STAGE_SESSION_STATE_OPEN,
    StageSessionState.COMPLETE: pipeline_pb2.STAGE_SESSION_STATE_COMPLETE,
    StageSessionState.FAILED: pipeline_pb2.STAGE_SESSION_STATE_FAILED,
    StageSessionState.DRAINED: pipeline_pb2.STAGE_SESSION_STATE_DRAINED,
}
_STATE_FROM_WIRE = {wire: state for state, wire in _STATE_TO_WIRE.items()}


def endpoint_to_proto(endpoint: StageEndpoint) -> transfer_pb2.StageEndpoint:
    return transfer_pb2.StageEndpoint(
        first_layer=endpoint.layers.start,
        end_layer=endpoint.layers.end,
        address=endpoint.address,
        incarnation=endpoint.incarnation,
        tensor_rank=endpoint.tensor.rank,
        tensor_size=endpoint.tensor.size,
    )


def endpoint_from_proto(message: transfer_pb2.StageEndpoint) -> StageEndpoint:
    """Return the endpoint in a message.

    Raises IncompatiblePeerError if the layer range is reversed or the rank is outside its stage.
    """
    if message.first_layer > message.end_layer:
        raise IncompatiblePeerError(
            f"stages.end_layer must be at least first_layer {message.first_layer}, "
            f"got {message.end_layer}"
        )
    tensor = TensorRank(message.tensor_rank, message.tensor_size or 1)
    if tensor.rank >= tensor.size:
        raise IncompatiblePeerError(
            f"stages.tensor_rank must be below tensor_size {tensor.size}, got {tensor.rank}"
        )
    return StageEndpoint(
        LayerRange(message.first_layer, message.end_layer),
        message.address,
        message.incarnation,
        tensor,
    )


def _endpoints(
    side: str, messages: Sequence[transfer_pb2.StageEndpoint]
) -> tuple[StageEndpoint, ...]:
    if len(messages) > MAX_STAGES:
        raise IncompatiblePeerError(f"{side}.stages: at most {MAX_STAGES}, got {len(messages)}")
    return tuple(map(endpoint_from_proto, messages))


def source_to_proto(source: SourceTerms) -> transfer_pb2.SourceTerms:
    return transfer_pb2.SourceTerms(
        compatibility=source.compatibility,
        compatibility_text=source.compatibility_text,
        page_size=source.page_size,
        num_tokens=source.num_tokens,
        chunk_tokens=source.chunk_tokens,
        page_ids=source.page_ids,
        slot_id=source.slot_id,
        stages=[endpoint_to_proto(stage) for stage in source.stages],
        sends_rest=source.sends_rest,
        request_key=source.request_key,
        is_loan=source.is_loan,
        content=source.content,
    )


def source_from_proto(message: transfer_pb2.SourceTerms) -> SourceTerms:
    """Return the source terms in a message.

    Raises IncompatiblePeerError naming the field if a size is zero, the pages do not hold the
    tokens, or a list or text is too long.
    """
    for name, value in (
        ("page_size", message.page_size),
        ("num_tokens", message.num_tokens),
        ("chunk_tokens", message.chunk_tokens),
    ):
        if value < 1:
            raise IncompatiblePeerError(f"source.{name} must be at least 1, got {value}")
    for name, text in (
        ("compatibility", message.compatibility),
        ("compatibility_text", message.compatibility_text),
    ):
        if len(text) > MAX_TEXT_CHARS:
            raise IncompatiblePeerError(
                f"source.{name} must have at most {MAX_TEXT_CHARS} characters, got {len(text)}"
            )
    num_pages = -(-message.num_tokens // message.page_size)
    if len(message.page_ids) != num_pages:
        raise IncompatiblePeerError(
            f"source.page_ids: {message.num_tokens} tokens in pages of {message.page_size} need "
            f"{num_pages} pages, got {len(message.page_ids)}"
        )
    return SourceTerms(
        compatibility=message.compatibility,
        compatibility_text=message.compatibility_text,
        page_size=message.page_size,
        num_tokens=message.num_tokens,
        chunk_tokens=message.chunk_tokens,
        page_ids=tuple(message.page_ids),
        slot_id=message.slot_id,
        stages=_endpoints("source", message.stages),
        sends_rest=message.sends_rest,
        request_key=message.request_key,
        is_loan=message.is_loan,
        content=message.content,
    )


def destination_to_proto(destination: DestinationTerms) -> transfer_pb2.DestinationTerms:
    return transfer_pb2.DestinationTerms(
        session_id=destination.session_id,
        epoch=destination.epoch,
        tag_base=destination.tag_base,
        page_ids=destination.page_ids,
        slot_id=destination.slot_id,
        stages=[endpoint_to_proto(stage) for stage in destination.stages],
        plan_digest=destination.plan_digest,
        key=destination.key,
        with_draft=destination.with_draft,
        held_tokens=destination.held_tokens,
    )


def destination_from_proto(message: transfer_pb2.DestinationTerms) -> DestinationTerms:
    """Return the destination terms in a message.

    Raises IncompatiblePeerError naming the field if the id of the session or the key has the wrong
    length, or there are too many stages.
    """
    if not 0 < len(message.session_id) <= MAX_ID_CHARS:
        raise IncompatiblePeerError(
            f"destination.session_id must have 1 to {MAX_ID_CHARS} characters, "
            f"got {len(message.session_id)}"
        )
    if len(message.key) != KEY_BYTES:
        raise IncompatiblePeerError(
            f"destination.key must have {KEY_BYTES} bytes, got {len(message.key)}"
        )
    return DestinationTerms(
        session_id=message.session_id,
        epoch=message.epoch,
        tag_base=message.tag_base,
        page_ids=tuple(message.page_ids),
        slot_id=message.slot_id,
        stages=_endpoints("destination", message.stages),
        plan_digest=message.plan_digest,
        key=message.key,
        with_draft=message.with_draft,
        held_tokens=message.held_tokens,
    )


def event_to_proto(event: StageSessionEvent) -> pipeline_pb2.StageSession:
    return pipeline_pb2.StageSession(
        session_id=event.session_id,
        epoch=event.epoch,
        state=_STATE_TO_WIRE[event.state],
        error_reason=event.error_reason,
        error_text=event.error_text,
        num_bytes=event.num_bytes,
    )


def event_from_proto(message: pipeline_pb2.StageSession) -> StageSessionEvent:
    """Return the event in a message. Raises InvalidRequestError for an unknown state."""
    state = _STATE_FROM_WIRE.get(message.state)
    if state is None:
        raise InvalidRequestError(FieldViolation("session.state", f"unknown state {message.state}"))
    return StageSessionEvent(
        message.session_id,
        message.epoch,
        state,
        message.error_reason,
        message.error_text,
        message.num_bytes,
    )
