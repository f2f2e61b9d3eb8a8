"""Values survive the wire; what a peer got wrong is refused by field."""

import pytest

from engine.core.layer_range import LayerRange
from protos import pipeline_pb2, transfer_pb2
from runtime.errors import IncompatiblePeerError, InvalidRequestError
from transfer.plan import codec
from transfer.plan.handoff_terms import (
    DestinationTerms,
    SourceTerms,
    StageEndpoint,
    StageSessionEvent,
    StageSessionState,
)
from transfer.transport.authenticator import new_key

STAGES = (
    StageEndpoint(LayerRange(0, 2), b"\x00address\xff", "life-1"),
    StageEndpoint(LayerRange(2, 4), b"", "life-2"),
)
SOURCE = SourceTerms("digest", "text", 4, 9, 8, (3, 1, 2), 7, STAGES, sends_rest=True)
DESTINATION = DestinationTerms(
    "session", 2, 0xFFFFFFFF_02000000, (9, 8, 7), 1, STAGES, "plan", new_key(), held_tokens=4
)


def test_terms_survive_the_wire() -> None:
    source = codec.source_to_proto(SOURCE).SerializeToString()
    assert codec.source_from_proto(transfer_pb2.SourceTerms.FromString(source)) == SOURCE
    destination = codec.destination_to_proto(DESTINATION).SerializeToString()
    assert (
        codec.destination_from_proto(transfer_pb2.DestinationTerms.FromString(destination))
        == DESTINATION
    )


@pytest.mark.parametrize("state", list(StageSessionState))
def test_reports_survive_the_wire(state: StageSessionState) -> None:
    event = StageSessionEvent("session", 3, state, "PEER_LOST", "gone", 12345)
    wire = codec.event_to_proto(event).SerializeToString()
    assert codec.event_from_proto(pipeline_pb2.StageSession.FromString(wire)) == event


@pytest.mark.parametrize(
    ("field", "value"), [("page_size", 0), ("num_tokens", 0), ("chunk_tokens", 0)]
)
def test_zero_sizes_are_refused(field: str, value: int) -> None:
    message = codec.source_to_proto(SOURCE)
    setattr(message, field, value)
    with pytest.raises(IncompatiblePeerError, match=rf"source\.{field} must be at least 1, got 0"):
        codec.source_from_proto(message)


def test_pages_that_do_not_hold_the_tokens_are_refused() -> None:
    message = codec.source_to_proto(SOURCE)
    message.page_ids.append(5)
    with pytest.raises(
        IncompatiblePeerError, match=r"source\.page_ids: 9 tokens in pages of 4 need 3 pages, got 4"
    ):
        codec.source_from_proto(message)


def test_a_reversed_layer_range_is_refused() -> None:
    with pytest.raises(
        IncompatiblePeerError, match=r"stages\.end_layer must be at least first_layer 5, got 4"
    ):
        codec.endpoint_from_proto(transfer_pb2.StageEndpoint(first_layer=5, end_layer=4))


def test_destination_terms_need_a_session_and_a_report_a_known_state() -> None:
    with pytest.raises(IncompatiblePeerError, match="session_id"):
        codec.destination_from_proto(transfer_pb2.DestinationTerms())
    with pytest.raises(InvalidRequestError, match="unknown state 0"):
        codec.event_from_proto(pipeline_pb2.StageSession(session_id="s"))
