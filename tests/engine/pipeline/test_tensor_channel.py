"""Tensors sent outside their frames, over a link whose messages end on command; and the bytes of a
packet."""

import time
from dataclasses import dataclass, field
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.pipeline import frames
from engine.pipeline.channel import Packet, PacketKind
from engine.pipeline.frames import TensorRoute
from engine.pipeline.links import P2PLinks, PendingLink
from engine.pipeline.tensor_channel import MAX_MESSAGES_UNDER_WAY, TensorChannel
from runtime.errors import DeadlineError, IntegrityError, InternalError, PeerLostError
from testing.inprocess_channel import InProcessChannel

LIMIT = 1 << 16


@dataclass
class Message:
    flat: Tensor
    outcome: bool | RuntimeError = False

    def wait(self, timeout_s: float) -> bool:
        if isinstance(self.outcome, RuntimeError):
            raise self.outcome
        return self.outcome


@dataclass
class HandLink:
    """A link that records sent tensors and delivers only zeros."""

    outcome: bool | RuntimeError = True
    sent: list[Message] = field(default_factory=list)
    is_aborted: bool = False
    takes_s: float = 0.0

    def send(self, flat: Tensor) -> Message:
        self.sent.append(Message(flat, self.outcome))
        return self.sent[-1]

    def receive(self, num_bytes: int) -> tuple[Tensor, Message]:
        flat = torch.zeros(num_bytes, dtype=torch.uint8)
        time.sleep(self.takes_s)
        return flat, Message(flat, self.outcome)

    def abort(self) -> None:
        self.is_aborted = True


@dataclass
class HandLinks:
    """Of a stage whose neighbors are 0 and 2."""

    link: HandLink

    def __post_init__(self) -> None:
        self.device = torch.device("cpu")
        self.pending = PendingLink(lambda: self.link)

    def to(self, rank: int) -> PendingLink | None:
        return self.pending if rank == 2 else None

    def coming_from(self, rank: int) -> PendingLink | None:
        return self.pending if rank == 0 else None

    def abort(self) -> None:
        self.pending.abort()


@dataclass
class Stage:
    """Rank 1 of three, with the frames of the others."""

    link: HandLink
    message_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        self.frames = InProcessChannel.pool(3, max_frame_bytes=LIMIT + 4096)
        self.channel = TensorChannel(
            self.frames[1], max_bytes=LIMIT, message_timeout_s=self.message_timeout_s
        )
        self.channel.use(cast(P2PLinks, HandLinks(self.link)))

    def announce(self, tensor: Tensor) -> None:
        self.frames[0].send(
            1, frames.write(TensorRoute.BESIDE, Packet(b"record", (tensor,))), timeout_s=1.0
        )


def test_tensors_go_by_the_lane_and_only_their_description_in_the_frame() -> None:
    stage, tensor = Stage(HandLink()), torch.randn(40, 50)
    stage.channel.send(2, Packet(b"record", (tensor,)), timeout_s=1.0)
    frame = stage.frames[2].receive(1, timeout_s=1.0)
    assert frame is not None
    assert len(frame) < 100
    (message,) = stage.link.sent
    assert torch.equal(frames.cut(message.flat, frames.read(frame).specs)[0], tensor)


def test_frames_without_tensors_need_no_lane() -> None:
    stage = Stage(HandLink(RuntimeError("unusable")))
    stage.channel.send(0, Packet(b"result"), timeout_s=1.0)
    assert stage.frames[0].receive(1, timeout_s=1.0) is not None


def test_tensors_for_another_than_the_next_stage_are_refused() -> None:
    with pytest.raises(InternalError, match="to the next stage only, not to stage 0"):
        Stage(HandLink()).channel.send(0, Packet(b"", (torch.zeros(1),)), timeout_s=1.0)


def test_transfers_in_flight_are_bounded_and_time_out() -> None:
    stage, packet = Stage(HandLink(outcome=False)), Packet(b"", (torch.zeros(1),))
    for _ in range(MAX_MESSAGES_UNDER_WAY):
        stage.channel.send(2, packet, timeout_s=0.1)
    with pytest.raises(DeadlineError, match=r"stage 2 did not arrive in time, within 0\.1 s"):
        stage.channel.send(2, packet, timeout_s=0.1)
    assert stage.link.is_aborted, "the memory is no longer read or written"
    with pytest.raises(PeerLostError):
        stage.channel.send(2, packet, timeout_s=0.1)


def test_messages_that_got_across_make_room() -> None:
    stage, packet = Stage(HandLink(outcome=True)), Packet(b"", (torch.zeros(1),))
    for _ in range(3 * MAX_MESSAGES_UNDER_WAY):
        stage.channel.send(2, packet, timeout_s=0.1)
        assert stage.frames[2].receive(1, timeout_s=0.1) is not None
    assert not stage.link.is_aborted


def test_tensors_that_do_not_follow_their_frame_are_a_lost_stage() -> None:
    stage = Stage(HandLink(outcome=False), message_timeout_s=0.2)
    stage.announce(torch.zeros(3))
    with pytest.raises(PeerLostError, match="stage 0 did not arrive in time"):
        stage.channel.receive(0, timeout_s=0.1)
    assert stage.link.is_aborted


def test_long_steps_extend_the_timeout_of_tensors() -> None:
    """A device sends them when it has computed them, which the frame does not wait for."""
    stage = Stage(HandLink(outcome=True, takes_s=0.2), message_timeout_s=0.1)
    stage.announce(torch.zeros(3))
    assert stage.channel.receive(0, timeout_s=0.1) is not None
    stage.link.outcome = False
    stage.announce(torch.zeros(3))
    began_s = time.monotonic()
    with pytest.raises(PeerLostError, match="stage 0 did not arrive in time"):
        stage.channel.receive(0, timeout_s=0.1)
    assert time.monotonic() - began_s >= 8 * 0.2


def test_a_death_is_heard_while_tensors_are_waited_for() -> None:
    stage = Stage(HandLink(outcome=False), message_timeout_s=30.0)
    stage.announce(torch.zeros(3))
    stage.frames[0].close()
    with pytest.raises(PeerLostError, match="stage 0 is gone"):
        stage.channel.receive(0, timeout_s=0.1)


def test_a_message_that_fails_is_never_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(HandLink(outcome=RuntimeError("connection reset by [10.0.0.7]:4711")))
    reasons, fail = list[str](), stage.frames[1].fail

    def note(rank: int, reason: str) -> None:
        reasons.append(reason)
        fail(rank, reason)

    monkeypatch.setattr(stage.frames[1], "fail", note)
    stage.announce(torch.zeros(3))
    with pytest.raises(PeerLostError):
        stage.channel.receive(0, timeout_s=0.1)
    assert reasons == ["the link to or from stage 0 failed"], (
        "clients read it, who are told no address"
    )
    with pytest.raises(PeerLostError):
        stage.channel.receive(0, timeout_s=0.1)


def test_an_announcement_over_the_limit_takes_no_memory() -> None:
    stage = Stage(HandLink())
    stage.announce(torch.zeros(LIMIT))
    with pytest.raises(InternalError, match="which cannot arrive here"):
        stage.channel.receive(0, timeout_s=0.1)


def test_closing_ends_transfers_in_flight() -> None:
    stage = Stage(HandLink(outcome=False))
    stage.channel.send(2, Packet(b"", (torch.zeros(1),)), timeout_s=0.1)
    stage.channel.close()
    assert stage.link.is_aborted
    with pytest.raises(PeerLostError):
        stage.frames[2].check(1)


TENSORS = st.lists(
    st.builds(
        lambda shape, dtype: torch.randn(tuple(shape)).mul(9).to(dtype),
        st.lists(st.integers(0, 5), max_size=3),
        st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int32]),
    ),
    max_size=4,
)


PACKETS = st.builds(
    Packet,
    st.binary(max_size=200),
    TENSORS.map(tuple),
    st.sampled_from(PacketKind),
    st.integers(0, 2**64 - 1),
)


@given(PACKETS)
def test_a_packet_survives_the_wire(packet: Packet) -> None:
    data = frames.write(TensorRoute.WITHIN, packet)
    arrived = frames.read(memoryview(data))
    assert (bytes(arrived.record), arrived.kind, arrived.sequence) == (
        packet.record,
        packet.kind,
        packet.sequence,
    )
    cut = frames.cut(torch.tensor(list(arrived.run), dtype=torch.uint8), arrived.specs)
    assert all(map(torch.equal, cut, packet.tensors))
    assert [tensor.dtype for tensor in cut] == [tensor.dtype for tensor in packet.tensors]


@given(packet=PACKETS, share=st.floats(0, 0.99))
def test_a_packet_cut_short_is_noticed(packet: Packet, share: float) -> None:
    """Though the channel takes it for genuine."""
    data = frames.write(TensorRoute.WITHIN, packet)
    with pytest.raises((IntegrityError, InternalError)):
        frames.read(memoryview(data)[: int(len(data) * share)])


@given(packet=PACKETS, head_bytes=st.integers(0, 70))
def test_the_head_is_left_to_the_channel(packet: Packet, head_bytes: int) -> None:
    data = frames.write(TensorRoute.WITHIN, packet, head_bytes)
    assert bytes(data) == bytes(head_bytes) + bytes(frames.write(TensorRoute.WITHIN, packet))


def test_a_frame_of_another_schema_names_and_loses_its_stage() -> None:
    """What no member of this version sends, though it is authentic; the channel's own suite has the
    rest."""
    stage = Stage(HandLink())
    data = frames.write(
        TensorRoute.WITHIN, Packet(b"record", (torch.ones(9),), PacketKind.RESULT, 17)
    )
    data[4] += 1
    stage.frames[0].send(1, data, timeout_s=1.0)
    with pytest.raises(IntegrityError, match=r"from stage 0: \d+ bytes are not a frame of schema"):
        stage.channel.receive(0, timeout_s=1.0)
    with pytest.raises(PeerLostError):
        stage.channel.receive(0, timeout_s=1.0)
