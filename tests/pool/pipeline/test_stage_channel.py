"""Packets between stages: whole, in order, of this epoch only; and a lost stage is reported within
seconds.

One suite for every way that tensors can travel: within their frames over UCX, and separately over
links.
"""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.pipeline.channel import Packet
from engine.pipeline.rendezvous import RendezvousHost
from pool.pipeline.stage_channel import Choice, PoolChannel, StageAddress, choose, open_pool_channel
from pool.stage.config import WorkerConfig
from runtime.errors import ConfigError, DeadlineError, IntegrityError, InternalError, PeerLostError
from tests.support.network.cpu_time import least_cpu_s
from tests.support.network.ports import taken_port
from tests.support.pool.channel_child import KINDS, MAX_BYTES, channel_of
from tests.support.pool.formings import forming_of

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def channels(kind: str) -> Iterator[list[PoolChannel]]:
    """Connect three stages in epoch 1 that have exchanged greetings, so that one thread can run
    them all."""
    channels = [channel_of(rank, kind) for rank in range(3)]
    for channel in channels:
        channel.connect([channel.address for channel in channels], forming_of(1, 3))

    def greet(rank: int) -> None:
        others = [other for other in range(3) if other != rank]
        for other in others:
            send(channels[rank], other, b"hello")
        assert [received(channels[rank], other) for other in others] == [b"hello", b"hello"]

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(greet, range(3)))
    yield channels
    for channel in channels:
        channel.close()


def send(
    channel: PoolChannel,
    rank: int,
    frame: bytes | bytearray,
    *tensors: torch.Tensor,
    timeout_s: float = 60.0,
) -> None:
    channel.send(rank, Packet(frame, tensors), timeout_s=timeout_s)


def received(channel: PoolChannel, rank: int) -> bytes | None:
    packet = channel.receive(rank, timeout_s=60.0)
    return None if packet is None else bytes(packet.record)


def tensors_from(channel: PoolChannel, rank: int) -> tuple[torch.Tensor, ...]:
    packet = channel.receive(rank, timeout_s=60.0)
    assert packet is not None
    return packet.tensors


@pytest.mark.parametrize("num_bytes", [0, 1, 1000, 8191, 8192, 100_000, 1 << 20])
def test_frames_arrive_whole(channels: list[PoolChannel], num_bytes: int) -> None:
    frame = bytes(i * 7 % 251 for i in range(num_bytes))
    send(channels[0], 1, frame)
    assert received(channels[1], 0) == frame


def test_frames_keep_their_order_by_sender(channels: list[PoolChannel]) -> None:
    for i in range(20):
        send(channels[0], 2, b"from 0: %d" % i * (1 + 700 * (i % 3)))
        send(channels[1], 2, b"from 1: %d" % i)
    assert [received(channels[2], 1) for i in range(20)] == [b"from 1: %d" % i for i in range(20)]
    assert [received(channels[2], 0) for i in range(20)] == [
        b"from 0: %d" % i * (1 + 700 * (i % 3)) for i in range(20)
    ]


def test_a_sent_record_may_be_reused_at_once(channels: list[PoolChannel]) -> None:
    frame = bytearray(b"a" * 100_000)
    send(channels[0], 1, frame)
    frame[:] = b"b" * 100_000
    assert received(channels[1], 0) == b"a" * 100_000


def test_sending_does_not_wait_for_the_receiver(channels: list[PoolChannel]) -> None:
    for _ in range(4):
        send(channels[0], 1, bytes(300_000))  # no receiver runs meanwhile: waiting would time out
    assert [received(channels[1], 0) for _ in range(4)] == [bytes(300_000)] * 4


def test_a_sender_that_computes_holds_no_large_frame_back(channels: list[PoolChannel]) -> None:
    """512 tokens of 4,096 in bf16 are 4 MiB, which exceeds every queue. No receiver runs while they
    are sent, and the sender does not use its channel while they are received."""
    hidden = [torch.full((512, 4096), value, dtype=torch.bfloat16) for value in range(4)]
    for tensor in hidden:
        send(channels[0], 1, b"", tensor, timeout_s=30.0)
    assert [set(tensors_from(channels[1], 0)[0].flatten().tolist()) for _ in hidden] == [
        {0.0},
        {1.0},
        {2.0},
        {3.0},
    ]


def test_frames_larger_than_the_queues_go_through(channels: list[PoolChannel]) -> None:
    frames = [bytes([i]) * MAX_BYTES for i in range(3)]

    def send_all() -> None:
        for frame in frames:
            send(channels[0], 1, frame)

    sender = threading.Thread(target=send_all)
    sender.start()
    assert [received(channels[1], 0) for _ in range(3)] == frames
    sender.join()


def test_a_frame_over_the_limit_is_refused_before_anything_leaves(
    channels: list[PoolChannel],
) -> None:
    with pytest.raises(InternalError, match=f"the limit is {MAX_BYTES}"):
        send(channels[0], 1, bytes(MAX_BYTES + 1))
    send(channels[0], 1, b"next")
    assert received(channels[1], 0) == b"next"


def test_frames_of_an_older_epoch_never_surface(channels: list[PoolChannel]) -> None:
    addresses = [channel.address for channel in channels]
    send(channels[0], 1, b"old and unread")
    channels[1].connect(addresses, forming_of(2, 3))
    send(channels[0], 1, b"old and late")
    assert channels[1].receive(0, timeout_s=0.1) is None
    channels[0].connect(addresses, forming_of(2, 3))
    send(channels[0], 1, b"new")
    assert received(channels[1], 0) == b"new"


def test_frames_of_a_newer_epoch_are_not_kept_for_it(channels: list[PoolChannel]) -> None:
    """A leader sends when all are connected: what comes before is a stranger's."""
    addresses = [channel.address for channel in channels]
    channels[0].connect(addresses, forming_of(2, 3))
    send(channels[0], 1, b"early")
    assert channels[1].receive(0, timeout_s=0.1) is None
    channels[1].connect(addresses, forming_of(2, 3))
    send(channels[0], 1, b"in time")
    with pytest.raises(IntegrityError, match="others before it are missing"):
        received(channels[1], 0)


def test_epochs_only_go_up(channels: list[PoolChannel]) -> None:
    with pytest.raises(InternalError, match="above 1, got 1"):
        channels[0].connect([channel.address for channel in channels], forming_of(1, 3))


def test_no_frame_in_time_is_none(channels: list[PoolChannel]) -> None:
    started = time.monotonic()
    assert channels[0].receive(1, timeout_s=0.2) is None
    assert time.monotonic() - started > 0.15


def test_wake_ends_a_receive_early(channels: list[PoolChannel]) -> None:
    timer = threading.Timer(0.1, channels[0].wake)
    timer.start()
    started = time.monotonic()
    assert channels[0].receive(1, timeout_s=60.0) is None
    assert time.monotonic() - started < 30.0
    timer.join()


def test_waiting_burns_no_cpu(channels: list[PoolChannel]) -> None:
    assert least_cpu_s(lambda: channels[0].receive(1, timeout_s=0.5)) < 0.25


def test_the_membership_ends_a_wait_for_a_lost_stage(channels: list[PoolChannel]) -> None:
    timer = threading.Timer(0.1, channels[0].fail, args=(1, "stage 1 has left"))
    timer.start()
    with pytest.raises(PeerLostError, match="stage 1 has left"):
        channels[0].receive(1, timeout_s=60.0)
    timer.join()
    with pytest.raises(PeerLostError, match="stage 1 has left"):
        send(channels[0], 1, b"", timeout_s=1.0)
    send(channels[0], 2, b"still here")
    assert received(channels[2], 0) == b"still here"


def test_frames_before_a_loss_are_still_handed_out(channels: list[PoolChannel]) -> None:
    send(channels[1], 0, b"last words")
    time.sleep(0.05)
    channels[0].fail(1, "gone")
    assert received(channels[0], 1) == b"last words"
    with pytest.raises(PeerLostError):
        channels[0].receive(1, timeout_s=1.0)


def test_an_address_that_is_none_is_refused(channels: list[PoolChannel]) -> None:
    with pytest.raises(PeerLostError, match="not the address"):
        channels[0].connect(
            [channels[0].address, b"nonsense", channels[2].address], forming_of(2, 3)
        )


def made(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)


def test_tensors_arrive_whole_with_their_frame(channels: list[PoolChannel]) -> None:
    sent = (
        made(3, 5, dtype=torch.bfloat16),
        made(1000),
        made(2, 0),
        made(2, 3, 4, dtype=torch.int32),
        made(7, dtype=torch.float16),
        made(4, 6).t(),
    )
    for sender in (0, 1):
        send(channels[sender], sender + 1, b"frame", *sent)
        packet = channels[sender + 1].receive(sender, timeout_s=60.0)
        assert packet is not None
        assert bytes(packet.record) == b"frame"
        assert all(map(torch.equal, packet.tensors, sent))
        assert [tensor.dtype for tensor in packet.tensors] == [tensor.dtype for tensor in sent]


def test_sent_tensors_may_be_overwritten_at_once_and_keep_their_order(
    channels: list[PoolChannel],
) -> None:
    tensor = torch.zeros(50_000)
    for value in range(8):
        tensor.fill_(value)
        send(channels[0], 1, b"%d" % value, tensor)
    tensor.fill_(-1)
    arrived = [
        tensors_from(channels[1], 0)[0] for _ in range(8)
    ]  # the receiver's own: the next does not touch them
    assert [set(tensor.tolist()) for tensor in arrived] == [{float(value)} for value in range(8)]


def test_tensors_over_the_limit_are_refused_before_anything_leaves(
    channels: list[PoolChannel],
) -> None:
    with pytest.raises(InternalError, match=f"the limit is {MAX_BYTES}"):
        send(channels[0], 1, b"", torch.zeros(MAX_BYTES // 4 + 1))
    send(channels[0], 1, b"next", made(5))
    assert torch.equal(tensors_from(channels[1], 0)[0], made(5))


def test_tensors_of_an_older_epoch_never_surface(channels: list[PoolChannel]) -> None:
    addresses = [channel.address for channel in channels]
    send(channels[0], 1, b"old", made(9))
    for channel in channels:
        channel.connect(addresses, forming_of(2, 3))
    send(channels[0], 1, b"new", made(3))
    packet = channels[1].receive(0, timeout_s=60.0)
    assert packet is not None
    assert (bytes(packet.record), packet.tensors[0].tolist()) == (b"new", [0.0, 1.0, 2.0])


class Child:
    """A further stage in another process."""

    def __init__(self, kind: str, rank: int = 1) -> None:
        command = [sys.executable, "-m", "tests.support.pool.channel_child", kind, str(rank)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.address = bytes.fromhex(self.says())

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()


def form(leader: PoolChannel, epoch: int, *children: Child) -> None:
    addresses = [leader.address, *(child.address for child in children)]
    for child in children:
        assert child.process.stdin is not None
        child.process.stdin.write(f"{epoch} {' '.join(address.hex() for address in addresses)}\n")
        child.process.stdin.flush()
    leader.connect(addresses, forming_of(epoch, len(addresses)))
    for child in children:
        assert child.says() == "formed"  # a frame that comes sooner is foreign to it


def test_a_killed_stage_is_noticed_and_its_successor_takes_over(kind: str) -> None:
    leader, child = channel_of(0, kind), Child(kind)
    form(leader, 1, child)
    send(leader, 1, b"there and back", made(10))
    assert received(leader, 1) == b"there and back 45"
    child.stop()
    with pytest.raises(PeerLostError):
        leader.receive(1, timeout_s=30.0)
    with pytest.raises(PeerLostError):
        send(leader, 1, b"", made(10))
    successor = Child(kind)
    form(leader, 2, successor)
    send(leader, 1, b"again", made(20))
    assert received(leader, 1) == b"again 190"
    check_a_stopped_stage_runs_into_the_deadline(leader, successor)
    leader.close()


def check_a_stopped_stage_runs_into_the_deadline(leader: PoolChannel, child: Child) -> None:
    """Check that a stopped stage, whose connection stays open, ends by the deadline and that the
    connection is then cut."""

    def send_on() -> None:
        while True:
            send(leader, 1, b"", torch.zeros(MAX_BYTES // 4), timeout_s=0.5)

    child.process.send_signal(signal.SIGSTOP)
    with pytest.raises(DeadlineError, match=r"within 0\.5 s"):
        send_on()
    with pytest.raises(PeerLostError):
        send(leader, 1, b"", timeout_s=0.5)
    child.stop()


def test_all_stages_hear_of_a_killed_one_and_form_again_with_its_successor() -> None:
    leader, first, last = channel_of(0, "lanes"), Child("lanes", 1), Child("lanes", 2)
    for epoch in (1, 2):
        form(leader, epoch, first, last)
        for step in range(3):
            send(leader, 1, b"%d:" % step, made(100), made(step, dtype=torch.bfloat16))
        assert [received(leader, 2) for _ in range(3)] == [b"0: 4950 0", b"1: 4950 0", b"2: 4950 1"]
        first.stop()
        assert last.says() == "lost"
        with pytest.raises(PeerLostError):
            leader.receive(1, timeout_s=30.0)
        first = first if epoch == 2 else Child("lanes", 1)
    last.stop()
    leader.close()


OWN = [StageAddress(0, b"a", "nccl", "GPU-1"), StageAddress(1, b"b", "nccl", "GPU-2")]


@pytest.mark.parametrize(
    ("stages", "choice"),
    [
        (OWN, Choice("nccl", "every stage has a device of its own")),
        (
            [*OWN, StageAddress(2, b"c", "nccl", "GPU-1")],
            Choice("", "stages 0 and 2 share device GPU-1"),
        ),
        (
            [OWN[0], StageAddress(1, b"b", why="computes on cpu")],
            Choice("", "stage 1 computes on cpu"),
        ),
        (
            [OWN[0], StageAddress(1, b"b", "gloo", "1")],
            Choice("", "stage 1 has gloo, stage 0 nccl"),
        ),
    ],
    ids=["a device each", "shared", "one on a host", "two kinds"],
)
def test_lanes_are_chosen_when_every_stage_has_a_device(
    stages: list[StageAddress], choice: Choice
) -> None:
    assert choose([StageAddress.unpack(stage.pack()) for stage in stages]) == choice


def test_lanes_that_are_demanded_and_cannot_be_are_refused() -> None:
    demanding = StageAddress(2, b"c", "nccl", "GPU-1", is_demanded=True)
    with pytest.raises(
        ConfigError,
        match="stage 2 demands stage_channel nccl, but stages 0 and 2 share device GPU-1",
    ):
        choose([*OWN, demanding])


@pytest.mark.parametrize("listen", ["127.0.0.1", "0.0.0.0", "::1"])
def test_stages_meet_in_the_first_free_port_of_the_range(listen: str) -> None:
    with taken_port(listen) as taken:
        host = RendezvousHost(listen, (taken, taken + 1))
        assert host.place.port == taken + 1
        host.place.enter("room", 5.0).set("key", "value")
        assert replace(host.place).enter("room", 5.0).get("key") == b"value"
        with pytest.raises(ConfigError, match=f"a port of {taken}-{taken}"):
            RendezvousHost(listen, (taken, taken))


def test_nccl_is_refused_if_missing() -> None:
    config = WorkerConfig(model=ROOT, stage_channel="nccl")
    with pytest.raises(
        ConfigError, match="needs a CUDA device and NCCL, this stage computes on cpu"
    ) as refused:
        open_pool_channel(config, torch.device("cpu"), max_bytes=1, on_sent=lambda num_bytes: None)
    assert refused.value.field == "stage_channel"
