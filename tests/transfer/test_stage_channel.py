"""Frames between stages: whole, in order, of this epoch only; and a stage that is gone is told within seconds."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runtime.errors import DeadlineError, InternalError, PeerLostError
from tests.support.channel_child import MAX_FRAME_BYTES
from transfer.stage_channel import UcxStageChannel
from transfer.ucx_settings import TransportProfile

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=[TransportProfile.SHM, TransportProfile.TCP])
def profile(request: pytest.FixtureRequest) -> TransportProfile:
    return TransportProfile(request.param)


def channel_of(rank: int, profile: TransportProfile) -> UcxStageChannel:
    return UcxStageChannel(rank=rank, max_frame_bytes=MAX_FRAME_BYTES, profile=profile)


@pytest.fixture
def channels(profile: TransportProfile) -> Iterator[list[UcxStageChannel]]:
    """Three stages, connected in epoch 1, that have greeted each other: from then on one thread can play them all."""
    channels = [channel_of(rank, profile) for rank in range(3)]
    for channel in channels:
        channel.connect([channel.address for channel in channels], 1)

    def greet(rank: int) -> None:
        others = [other for other in range(3) if other != rank]
        for other in others:
            channels[rank].send(other, b"hello", timeout_s=5.0)
        assert [received(channels[rank], other) for other in others] == [b"hello", b"hello"]

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(greet, range(3)))
    yield channels
    for channel in channels:
        channel.close()


def received(channel: UcxStageChannel, rank: int) -> bytes | None:
    frame = channel.receive(rank, timeout_s=5.0)
    return None if frame is None else bytes(frame)


@pytest.mark.parametrize("num_bytes", [0, 1, 1000, 8191, 8192, 100_000, 1 << 20])
def test_frames_arrive_whole(channels: list[UcxStageChannel], num_bytes: int) -> None:
    frame = bytes(i * 7 % 251 for i in range(num_bytes))
    channels[0].send(1, frame, timeout_s=5.0)
    assert received(channels[1], 0) == frame


def test_frames_keep_their_order_by_sender(channels: list[UcxStageChannel]) -> None:
    for i in range(20):
        channels[0].send(2, b"from 0: %d" % i * (1 + 700 * (i % 3)), timeout_s=5.0)
        channels[1].send(2, b"from 1: %d" % i, timeout_s=5.0)
    assert [received(channels[2], 1) for i in range(20)] == [b"from 1: %d" % i for i in range(20)]
    assert [received(channels[2], 0) for i in range(20)] == [b"from 0: %d" % i * (1 + 700 * (i % 3)) for i in range(20)]


def test_a_sent_frame_may_be_reused_at_once(channels: list[UcxStageChannel]) -> None:
    frame = bytearray(b"a" * 100_000)
    channels[0].send(1, frame, timeout_s=5.0)
    frame[:] = b"b" * 100_000
    assert received(channels[1], 0) == b"a" * 100_000


def test_sending_does_not_wait_for_the_receiver(channels: list[UcxStageChannel]) -> None:
    started = time.monotonic()
    for _ in range(4):
        channels[0].send(1, bytes(300_000), timeout_s=5.0)
    assert time.monotonic() - started < 2.0
    assert [received(channels[1], 0) for _ in range(4)] == [bytes(300_000)] * 4


def test_frames_larger_than_the_queues_go_through(channels: list[UcxStageChannel]) -> None:
    frames = [bytes([i]) * MAX_FRAME_BYTES for i in range(3)]

    def send_all() -> None:
        for frame in frames:
            channels[0].send(1, frame, timeout_s=20.0)

    sender = threading.Thread(target=send_all)
    sender.start()
    assert [received(channels[1], 0) for _ in range(3)] == frames
    sender.join()


def test_a_frame_over_the_limit_is_refused_before_anything_leaves(channels: list[UcxStageChannel]) -> None:
    with pytest.raises(InternalError, match=f"the limit is {MAX_FRAME_BYTES}"):
        channels[0].send(1, bytes(MAX_FRAME_BYTES + 1), timeout_s=5.0)
    channels[0].send(1, b"next", timeout_s=5.0)
    assert received(channels[1], 0) == b"next"


def test_frames_of_an_older_epoch_never_surface(channels: list[UcxStageChannel]) -> None:
    addresses = [channel.address for channel in channels]
    channels[0].send(1, b"old and unread", timeout_s=5.0)
    channels[1].connect(addresses, 2)
    channels[0].send(1, b"old and late", timeout_s=5.0)
    assert channels[1].receive(0, timeout_s=0.1) is None
    channels[0].connect(addresses, 2)
    channels[0].send(1, b"new", timeout_s=5.0)
    assert received(channels[1], 0) == b"new"


def test_frames_of_a_newer_epoch_wait_for_it(channels: list[UcxStageChannel]) -> None:
    addresses = [channel.address for channel in channels]
    channels[0].connect(addresses, 2)
    channels[0].send(1, b"early 1", timeout_s=5.0)
    channels[0].send(1, b"early 2", timeout_s=5.0)
    assert channels[1].receive(0, timeout_s=0.1) is None
    channels[1].connect(addresses, 2)
    assert [received(channels[1], 0), received(channels[1], 0)] == [b"early 1", b"early 2"]


def test_epochs_only_go_up(channels: list[UcxStageChannel]) -> None:
    with pytest.raises(InternalError, match="above 1, got 1"):
        channels[0].connect([channel.address for channel in channels], 1)


def test_no_frame_in_time_is_none(channels: list[UcxStageChannel]) -> None:
    started = time.monotonic()
    assert channels[0].receive(1, timeout_s=0.2) is None
    assert 0.15 < time.monotonic() - started < 2.0


def test_wake_ends_a_receive_early(channels: list[UcxStageChannel]) -> None:
    timer = threading.Timer(0.1, channels[0].wake)
    timer.start()
    started = time.monotonic()
    assert channels[0].receive(1, timeout_s=10.0) is None
    assert time.monotonic() - started < 5.0
    timer.join()


def test_waiting_burns_no_cpu(channels: list[UcxStageChannel]) -> None:
    used = time.thread_time()
    channels[0].receive(1, timeout_s=0.5)
    assert time.thread_time() - used < 0.1


def test_the_membership_ends_a_wait_for_a_lost_stage(channels: list[UcxStageChannel]) -> None:
    timer = threading.Timer(0.1, channels[0].fail, args=(1, "stage 1 has left"))
    timer.start()
    with pytest.raises(PeerLostError, match="stage 1 has left"):
        channels[0].receive(1, timeout_s=10.0)
    timer.join()
    with pytest.raises(PeerLostError, match="stage 1 has left"):
        channels[0].send(1, b"", timeout_s=1.0)
    channels[0].send(2, b"still here", timeout_s=5.0)
    assert received(channels[2], 0) == b"still here"


def test_frames_before_a_loss_are_still_handed_out(channels: list[UcxStageChannel]) -> None:
    channels[1].send(0, b"last words", timeout_s=5.0)
    time.sleep(0.05)
    channels[0].fail(1, "gone")
    assert received(channels[0], 1) == b"last words"
    with pytest.raises(PeerLostError):
        channels[0].receive(1, timeout_s=1.0)


def test_an_address_that_is_none_is_refused(channels: list[UcxStageChannel]) -> None:
    with pytest.raises(PeerLostError, match="not the address"):
        channels[0].connect([channels[0].address, b"nonsense", channels[2].address], 2)


class Child:
    """A second stage in another process."""

    def __init__(self, profile: TransportProfile) -> None:
        self.process = subprocess.Popen([sys.executable, "-m", "tests.support.channel_child", profile], cwd=ROOT,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = bytes.fromhex(self.process.stdout.readline().strip())

    def join(self, leader: UcxStageChannel, epoch: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{leader.address.hex()} {epoch}\n")
        self.process.stdin.flush()
        leader.connect([leader.address, self.address], epoch)

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()


def test_a_killed_stage_is_noticed_and_its_successor_takes_over(profile: TransportProfile) -> None:
    leader = channel_of(0, profile)
    for epoch in (1, 2):
        child = Child(profile)
        child.join(leader, epoch)
        leader.send(1, b"there and back %d" % epoch, timeout_s=5.0)
        assert received(leader, 1) == b"there and back %d" % epoch
        child.stop()
        started = time.monotonic()
        with pytest.raises(PeerLostError):
            leader.receive(1, timeout_s=20.0)
        assert time.monotonic() - started < 5.0
    leader.close()


def test_a_stage_that_takes_nothing_runs_into_the_deadline(profile: TransportProfile) -> None:
    leader, child = channel_of(0, profile), Child(profile)
    child.join(leader, 1)
    leader.send(1, b"hello", timeout_s=5.0)
    assert received(leader, 1) == b"hello"
    child.process.send_signal(signal.SIGSTOP)
    with pytest.raises(DeadlineError, match=r"within 0\.5 s"):
        leader.send(1, bytes(MAX_FRAME_BYTES), timeout_s=0.5)
    with pytest.raises(PeerLostError):
        leader.send(1, b"", timeout_s=0.5)
    child.stop()
    leader.close()
