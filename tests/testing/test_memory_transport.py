"""The in-memory transport fulfills the contract, and its faults behave as documented."""

from collections.abc import Callable

import pytest

from runtime.clock import ManualClock
from runtime.errors import PeerLostError
from testing.memory_transport import Fault, MemoryNetwork
from tests.transfer.contract import PREFIX, Pair, TransportContract, pattern, poisoned
from transfer.transport.protocol import OperationState, Transport


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork()


@pytest.fixture
def make_transport(network: MemoryNetwork) -> Callable[[], Transport]:
    return lambda: network.transport(ManualClock())


class TestContract(TransportContract):
    pass


@pytest.fixture
def pair(make_transport: Callable[[], Transport]) -> Pair:
    return Pair(make_transport(), make_transport())


def faulty(fault: Fault) -> Callable[[int, int], Fault]:
    return lambda tag, num_bytes: fault


def test_drop_looks_like_success_to_the_sender(network: MemoryNetwork, pair: Pair) -> None:
    network.fault = faulty(Fault.DROP)
    receive = pair.right.post_receive(pair.to_left, PREFIX, poisoned(10))
    pair.finish(pair.left.send(pair.to_right, PREFIX, pattern(10)))
    pair.settle()
    assert receive.state is OperationState.PENDING


def test_flip_changes_one_bit(network: MemoryNetwork, pair: Pair) -> None:
    network.fault = faulty(Fault.FLIP)
    target = poisoned(101)
    pair.finish(
        pair.right.post_receive(pair.to_left, PREFIX, target),
        pair.left.send(pair.to_right, PREFIX, pattern(101)),
    )
    assert sum((a ^ b).bit_count() for a, b in zip(target, pattern(101), strict=True)) == 1


def test_duplicate_arrives_twice(network: MemoryNetwork, pair: Pair) -> None:
    network.fault = faulty(Fault.DUPLICATE)
    targets = [poisoned(10), poisoned(10)]
    pair.finish(
        *[pair.right.post_receive(pair.to_left, PREFIX, target) for target in targets],
        pair.left.send(pair.to_right, PREFIX, pattern(10)),
    )
    assert targets == [pattern(10), pattern(10)]


def test_delay_keeps_both_ends_pending_until_release(network: MemoryNetwork, pair: Pair) -> None:
    network.fault = faulty(Fault.DELAY)
    target = poisoned(10)
    receive = pair.right.post_receive(pair.to_left, PREFIX, target)
    send = pair.left.send(pair.to_right, PREFIX, pattern(10))
    pair.settle()
    pair.right.cancel_receive(receive)
    pair.settle()
    assert (send.state, receive.state, target) == (
        OperationState.PENDING,
        OperationState.PENDING,
        poisoned(10),
    )
    network.release()
    pair.finish(send, receive)
    assert target == pattern(10)


def test_a_delayed_message_of_a_closed_peer_is_never_written(
    network: MemoryNetwork, pair: Pair
) -> None:
    network.fault = faulty(Fault.DELAY)
    target = poisoned(10)
    receive = pair.right.post_receive(pair.to_left, PREFIX, target)
    pair.left.send(pair.to_right, PREFIX, pattern(10))
    pair.settle()
    pair.right.close_peer(pair.to_left)
    pair.finish(receive)
    network.release()
    pair.settle()
    assert target == poisoned(10)


def test_death_is_noticed_by_the_other_side(network: MemoryNetwork, pair: Pair) -> None:
    receive = pair.right.post_receive(pair.to_left, PREFIX, poisoned(10))
    network.fault = faulty(Fault.DIE)
    pair.left.send(pair.to_right, PREFIX, pattern(10))
    pair.finish(receive)
    assert isinstance(receive.error, PeerLostError)
    assert not pair.to_left.alive
    with pytest.raises(PeerLostError):
        pair.right.connect(pair.left.address)
