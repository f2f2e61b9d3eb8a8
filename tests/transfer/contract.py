"""Contract of every transport. Each implementation's test file runs this suite over its own pair of
transports."""

import gc
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from runtime.errors import HandoffError, IncompatiblePeerError, PeerLostError
from tests.support.network.cpu_time import least_cpu_s
from transfer.transport.protocol import TAG_OFFSET_BITS, Operation, OperationState, Transport
from transfer.transport.refusals import RefusalReason

DONE, FAILED, CANCELLED = OperationState.DONE, OperationState.FAILED, OperationState.CANCELLED
PREFIX = 0x123456789A << TAG_OFFSET_BITS


class Pair:
    """Two connected transports, driven by one thread."""

    def __init__(self, left: Transport, right: Transport) -> None:
        self.left, self.right = left, right
        self.to_right, self.to_left = left.connect(right.address), right.connect(left.address)
        self.ended: list[Operation] = []

    def turn(self) -> None:
        self.ended += self.left.progress() + self.right.progress()

    def run(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Progress both until the condition holds."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "the transports did not get there in time"
            self.turn()

    def finish(self, *operations: Operation) -> None:
        """Progress until these have been reported."""
        self.run(lambda: all(operation in self.ended for operation in operations))

    def settle(self, seconds: float = 0.05) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.turn()


def pattern(num_bytes: int, seed: int = 1) -> memoryview:
    """Return bytes that differ by position and seed."""
    block = bytes((seed * 31 + i * 7) % 251 for i in range(min(num_bytes, 4099)))
    return memoryview(bytearray((block * (num_bytes // max(1, len(block)) + 1))[:num_bytes]))


def poisoned(num_bytes: int) -> memoryview:
    return memoryview(bytearray(b"\xee" * num_bytes))


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


class TransportContract:
    """Subclasses give the `transports` fixture: a factory of transports, and its end."""

    @pytest.fixture
    def pair(self, make_transport: Callable[[], Transport]) -> Iterator[Pair]:
        pair = Pair(make_transport(), make_transport())
        yield pair
        pair.left.close()
        pair.right.close()

    @pytest.mark.parametrize("num_bytes", [1, 93, 8191, 8192, 8193, 300_001, 3 << 20])
    def test_bytes_arrive_as_they_were_sent(self, pair: Pair, num_bytes: int) -> None:
        target = poisoned(num_bytes)
        receive = pair.right.post_receive(pair.to_left, PREFIX, target)
        send = pair.left.send(pair.to_right, PREFIX, pattern(num_bytes))
        pair.finish(send, receive)
        assert (send.state, receive.state) == (DONE, DONE)
        assert target == pattern(num_bytes)

    def test_tags_select_the_receive_buffer(self, pair: Pair) -> None:
        targets = [poisoned(20_000) for _ in range(8)]
        receives = [
            pair.right.post_receive(pair.to_left, PREFIX + i, target)
            for i, target in enumerate(targets)
        ]
        sends = [
            pair.left.send(pair.to_right, PREFIX + i, pattern(20_000, i))
            for i in reversed(range(8))
        ]
        pair.finish(*receives, *sends)
        assert all(target == pattern(20_000, i) for i, target in enumerate(targets))

    def test_messages_with_one_tag_keep_their_order(self, pair: Pair) -> None:
        targets = [poisoned(500) for _ in range(10)]
        receives = [pair.right.post_receive(pair.to_left, PREFIX, target) for target in targets]
        for i in range(10):
            pair.left.send(pair.to_right, PREFIX, pattern(500, i))
        pair.finish(*receives)
        assert all(target == pattern(500, i) for i, target in enumerate(targets))

    def test_both_directions_at_once(self, pair: Pair) -> None:
        here, there = poisoned(1 << 20), poisoned(1 << 20)
        pair.finish(
            pair.right.post_receive(pair.to_left, PREFIX, there),
            pair.left.post_receive(pair.to_right, PREFIX, here),
            pair.left.send(pair.to_right, PREFIX, pattern(1 << 20, 1)),
            pair.right.send(pair.to_left, PREFIX, pattern(1 << 20, 2)),
        )
        assert there == pattern(1 << 20, 1)
        assert here == pattern(1 << 20, 2)

    @pytest.mark.parametrize("num_sent", [10, 9_000, 40_000])
    @pytest.mark.parametrize("num_wanted", [11, 8_999, 39_999])
    def test_a_message_of_the_wrong_length_writes_nothing(
        self, pair: Pair, num_sent: int, num_wanted: int
    ) -> None:
        target = poisoned(num_wanted)
        receive = pair.right.post_receive(pair.to_left, PREFIX, target)
        send = pair.left.send(pair.to_right, PREFIX, pattern(num_sent))
        pair.finish(receive, send)
        assert receive.state is FAILED
        assert isinstance(receive.error, HandoffError)
        assert str(num_sent) in str(receive.error)
        assert str(num_wanted) in str(receive.error)
        assert send.state is DONE
        assert target == poisoned(num_wanted)

    def test_many_in_flight(self, pair: Pair) -> None:
        targets = [poisoned(20_000) for _ in range(400)]
        operations = [
            pair.right.post_receive(pair.to_left, PREFIX + i, target)
            for i, target in enumerate(targets)
        ]
        operations += [
            pair.left.send(pair.to_right, PREFIX + i, pattern(20_000, i)) for i in range(400)
        ]
        assert pair.left.num_pending == pair.right.num_pending == 400
        pair.run(lambda: len(pair.ended) == 800)
        assert {operation.state for operation in operations} == {DONE}
        assert all(target == pattern(20_000, i) for i, target in enumerate(targets))
        assert pair.left.num_pending == pair.right.num_pending == 0
        pair.settle()
        assert len(pair.ended) == 800, "an operation was reported twice"

    @pytest.mark.parametrize("num_bytes", [100, 100_000])
    def test_a_message_without_a_receive_is_refused_and_counted(
        self, pair: Pair, num_bytes: int
    ) -> None:
        """Receives are posted before their sender hears of the tags: what comes before is a
        stranger's."""
        send = pair.left.send(pair.to_right, PREFIX, pattern(num_bytes))
        pair.finish(send)
        target = poisoned(num_bytes)
        receive = pair.right.post_receive(pair.to_left, PREFIX, target)
        pair.settle()
        assert (send.state, receive.state) == (DONE, OperationState.PENDING)
        assert target == poisoned(num_bytes)
        assert pair.right.refused == {RefusalReason.FOREIGN: 1}

    @pytest.mark.parametrize("num_bytes", [100, 100_000])
    def test_a_duplicate_message_is_refused_as_repeated_then_as_late(
        self, pair: Pair, num_bytes: int
    ) -> None:
        target = poisoned(num_bytes)
        pair.finish(
            pair.right.post_receive(pair.to_left, PREFIX, target),
            pair.left.send(pair.to_right, PREFIX, pattern(num_bytes)),
        )
        pair.finish(
            pair.left.send(pair.to_right, PREFIX, pattern(num_bytes, 2)),
            pair.left.send(pair.to_right, PREFIX + 1, pattern(num_bytes, 2)),
        )
        pair.run(lambda: pair.right.refused == {RefusalReason.REPEATED: 2})
        pair.right.retire(PREFIX >> TAG_OFFSET_BITS)
        pair.finish(pair.left.send(pair.to_right, PREFIX, pattern(num_bytes, 2)))
        pair.run(lambda: pair.right.refused == {RefusalReason.REPEATED: 2, RefusalReason.LATE: 1})
        assert target == pattern(num_bytes)

    @pytest.mark.parametrize("num_bytes", [100, 100_000])
    def test_a_cancelled_receive_is_over_at_once_and_late_bytes_write_nothing(
        self, pair: Pair, num_bytes: int
    ) -> None:
        target = poisoned(num_bytes)
        receive = pair.right.post_receive(pair.to_left, PREFIX, target)
        pair.right.cancel_receive(receive)
        assert pair.right.progress() == [receive]
        assert receive.state is CANCELLED
        pair.right.retire(PREFIX >> TAG_OFFSET_BITS)
        send = pair.left.send(pair.to_right, PREFIX, pattern(num_bytes))
        pair.finish(send)
        pair.settle()
        assert target == poisoned(num_bytes)

    def test_cancelling_twice_or_too_late_changes_nothing(self, pair: Pair) -> None:
        target = poisoned(100)
        receive = pair.right.post_receive(pair.to_left, PREFIX, target)
        pair.finish(receive, pair.left.send(pair.to_right, PREFIX, pattern(100)))
        pair.right.cancel_receive(receive)
        pair.settle()
        assert receive.state is DONE
        assert pair.ended.count(receive) == 1

    @pytest.mark.parametrize("num_bytes", [100, 100_000])
    def test_retiring_releases_senders_of_unreceived_messages(
        self, pair: Pair, num_bytes: int
    ) -> None:
        sends = [pair.left.send(pair.to_right, PREFIX + i, pattern(num_bytes)) for i in range(5)]
        pair.settle()
        pair.right.retire(PREFIX >> TAG_OFFSET_BITS)
        sends += [
            pair.left.send(pair.to_right, PREFIX + i, pattern(num_bytes)) for i in range(5, 10)
        ]
        pair.finish(*sends)
        other = (PREFIX >> TAG_OFFSET_BITS) + 1
        target = poisoned(num_bytes)
        pair.finish(
            pair.left.send(pair.to_right, other << TAG_OFFSET_BITS, pattern(num_bytes)),
            pair.right.post_receive(pair.to_left, other << TAG_OFFSET_BITS, target),
        )
        assert target == pattern(num_bytes)

    def test_closing_a_peer_ends_everything_with_it(self, pair: Pair) -> None:
        receives = [
            pair.right.post_receive(pair.to_left, PREFIX + i, poisoned(50_000)) for i in range(4)
        ]
        sends = [pair.right.send(pair.to_left, PREFIX + i, pattern(50_000)) for i in range(4)]
        pair.settle()
        pair.right.close_peer(pair.to_left)
        assert not pair.to_left.alive
        pair.finish(*receives, *sends)
        assert {operation.state for operation in receives} == {FAILED}
        assert all(isinstance(operation.error, PeerLostError) for operation in receives)
        assert pair.right.num_pending == 0

    def test_operations_with_a_closed_peer_fail(self, pair: Pair) -> None:
        pair.right.close_peer(pair.to_left)
        late = [
            pair.right.send(pair.to_left, PREFIX, pattern(10)),
            pair.right.post_receive(pair.to_left, PREFIX, poisoned(10)),
        ]
        pair.finish(*late)
        assert {operation.state for operation in late} == {FAILED}
        assert all(isinstance(operation.error, PeerLostError) for operation in late)

    def test_both_sides_may_close_and_connect_again(self, pair: Pair) -> None:
        for attempt in range(3):
            target = poisoned(30_000)
            pair.finish(
                pair.right.post_receive(pair.to_left, PREFIX, target),
                pair.left.send(pair.to_right, PREFIX, pattern(30_000, attempt)),
            )
            assert target == pattern(30_000, attempt)
            pair.left.close_peer(pair.to_right)
            pair.right.close_peer(pair.to_left)
            pair.settle()
            pair.to_right, pair.to_left = (
                pair.left.connect(pair.right.address),
                pair.right.connect(pair.left.address),
            )

    def test_a_connection_cut_by_one_side_can_be_made_again(self, pair: Pair) -> None:
        """The other side may fail for a second until it has noticed, but it never hangs and then it
        works."""
        pair.right.close_peer(pair.to_left)
        deadline = time.monotonic() + 60.0
        tag = PREFIX
        while True:
            tag += 1
            to_left, to_right = (
                pair.right.connect(pair.left.address),
                pair.left.connect(pair.right.address),
            )
            target = poisoned(50_000)
            receive = pair.right.post_receive(to_left, tag, target)
            send = pair.left.send(to_right, tag, pattern(50_000))
            pair.run(lambda: send in pair.ended)  # noqa: B023
            pair.settle()
            pair.right.cancel_receive(receive)
            pair.finish(receive)
            if (send.state, receive.state) == (DONE, DONE):
                break
            assert time.monotonic() < deadline
        assert target == pattern(50_000)

    def test_connecting_twice_finds_the_same_peer(self, pair: Pair) -> None:
        assert pair.left.connect(pair.right.address) is pair.to_right

    @pytest.mark.parametrize("address", [b"", b"nonsense", b"x" * 200])
    def test_an_unusable_address_is_refused(self, pair: Pair, address: bytes) -> None:
        with pytest.raises(IncompatiblePeerError):
            pair.left.connect(address)

    def test_wake_ends_a_wait_from_another_thread(self, pair: Pair) -> None:
        pair.settle()
        timer = threading.Timer(0.1, pair.left.wake)
        timer.start()
        started = time.monotonic()
        pair.left.wait(60.0)
        timer.join()
        assert time.monotonic() - started < 30.0

    def test_a_wake_before_the_wait_is_not_lost(self, pair: Pair) -> None:
        pair.settle()
        pair.left.wake()
        started = time.monotonic()
        pair.left.wait(60.0)
        assert time.monotonic() - started < 30.0

    def test_a_message_ends_a_wait(self, pair: Pair) -> None:
        pair.settle()
        receive = pair.right.post_receive(pair.to_left, PREFIX, poisoned(100))
        pair.left.send(pair.to_right, PREFIX, pattern(100))
        started = time.monotonic()
        while receive not in pair.ended:
            pair.left.progress()
            pair.ended += pair.right.progress()
            if receive not in pair.ended:
                pair.right.wait(60.0)
        assert time.monotonic() - started < 30.0

    def test_waiting_burns_no_cpu(self, pair: Pair) -> None:
        def wait() -> None:
            deadline = time.monotonic() + 0.5
            while (left := deadline - time.monotonic()) > 0:
                pair.left.progress()
                pair.left.wait(left)

        pair.settle()
        assert least_cpu_s(wait) < 0.25

    @pytest.mark.long
    def test_a_thousand_sessions_leak_nothing(self, pair: Pair) -> None:
        def session(number: int) -> None:
            tag = (number << TAG_OFFSET_BITS) + 1
            target = poisoned(20_000)
            taken = pair.right.post_receive(pair.to_left, tag, target)
            never = pair.right.post_receive(pair.to_left, tag + 1, target)
            late = pair.left.send(pair.to_right, tag + 2, pattern(20_000))
            pair.finish(taken, pair.left.send(pair.to_right, tag, pattern(20_000)))
            pair.right.cancel_receive(never)
            pair.right.retire(number)
            pair.finish(never, late)
            pair.ended.clear()

        for number in range(200):
            session(number)
        gc.collect()
        fds, kib = num_fds(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(200, 1000):
            session(number)
        gc.collect()
        assert (
            num_fds() < fds + 20
        )  # threads of earlier tests may open some; a leak would be of hundreds
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - kib < 4096
        assert pair.left.num_pending == pair.right.num_pending == 0
