"""UCX keeps the contract over shared memory and TCP, between real processes that are really
killed."""

import contextlib
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import cast

import pytest

from runtime.clock import ManualClock, SystemClock
from runtime.errors import ConfigError, PeerLostError
from tests.support.pool.formings import forming_of
from tests.support.transfer.transfer_child import CHILD_FILL, SendingChild
from tests.transfer.contract import PREFIX, Pair, TransportContract, pattern, poisoned
from transfer.transport.protocol import Operation, OperationState, Transport
from transfer.ucx.api import UcxEndpoint, UcxLibrary
from transfer.ucx.settings import TransportProfile, live_devices, ucx_options
from transfer.ucx.sockets import UNACKNOWLEDGED_S
from transfer.ucx.stage_channel import UcxStageChannel
from transfer.ucx.transport import SOCKET_CHECK_S, UcxTransport

PROFILES = [TransportProfile.SHM, TransportProfile.TCP]
NUM_BYTES = 8 << 20
NUM_MESSAGES = 8
LIBRARY = "ucxx._lib.libucxx"


@pytest.fixture(params=PROFILES)
def profile(request: pytest.FixtureRequest) -> TransportProfile:
    return TransportProfile(request.param)


@pytest.fixture
def make_transport(profile: TransportProfile) -> Callable[[], Transport]:
    return lambda: UcxTransport(profile=profile, clock=SystemClock())


@pytest.mark.parametrize("failure", [ImportError, OSError])
def test_libraries_that_cannot_be_loaded_are_an_error_of_the_setting(
    monkeypatch: pytest.MonkeyPatch, failure: type[Exception]
) -> None:
    class Refusing:
        def find_spec(self, name: str, *_: object) -> None:
            if name == LIBRARY:
                raise failure("libucs.so: not page-aligned")

    monkeypatch.delitem(sys.modules, LIBRARY, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Refusing(), *sys.meta_path])
    with pytest.raises(ConfigError, match=r"libucs.so: not .*; install the ucx extra"):
        UcxLibrary()


class TestContract(TransportContract):
    pass


@pytest.fixture
def receiver(profile: TransportProfile) -> Iterator[UcxTransport]:
    transport = UcxTransport(profile=profile, clock=SystemClock())
    yield transport
    transport.close()


@pytest.fixture
def child(profile: TransportProfile) -> Iterator[SendingChild]:
    child = SendingChild(profile, NUM_BYTES, NUM_MESSAGES)
    yield child
    child.stop()


def start_receiving(
    receiver: UcxTransport, child: SendingChild
) -> tuple[list[Operation], list[memoryview]]:
    """Post a receive for each of the child's messages and progress until bytes of the first
    arrive."""
    peer = receiver.connect(child.address)
    targets = [memoryview(bytearray(NUM_BYTES)) for _ in range(NUM_MESSAGES)]
    operations = [
        receiver.post_receive(peer, PREFIX + i, target) for i, target in enumerate(targets)
    ]
    child.send_to(receiver.address, PREFIX)
    deadline = time.monotonic() + 60
    while not any(target[0] for target in targets):
        receiver.progress()
        assert time.monotonic() < deadline
    assert any(operation.state is OperationState.PENDING for operation in operations)
    return operations, targets


def progress_until_ended(receiver: UcxTransport, operations: list[Operation]) -> int:
    """Progress in turns of up to 10 ms until none of the operations is pending."""
    started, num_turns = time.monotonic(), 0
    while any(operation.state is OperationState.PENDING for operation in operations):
        receiver.progress()
        receiver.wait(0.01)
        num_turns += 1
        assert time.monotonic() - started < 60, [operation.state for operation in operations]
    return num_turns


def test_a_killed_source_ends_its_receives_by_itself(
    receiver: UcxTransport, child: SendingChild
) -> None:
    operations, _ = start_receiving(receiver, child)
    child.process.kill()
    child.process.wait()
    progress_until_ended(receiver, operations)
    lost = [operation for operation in operations if operation.state is OperationState.FAILED]
    assert lost
    assert all(isinstance(operation.error, PeerLostError) for operation in lost)
    assert receiver.num_pending == 0 or len(receiver.progress()) == receiver.num_pending


def test_closing_ends_the_receives_of_a_killed_source_at_once(
    receiver: UcxTransport, child: SendingChild
) -> None:
    operations, _ = start_receiving(receiver, child)
    child.process.kill()
    receiver.close_peer(operations[0].peer)
    assert progress_until_ended(receiver, operations) < 100


@pytest.mark.parametrize("num_turns", [0, 3, 30])
def test_no_byte_of_a_stopped_source_arrives_after_its_receives_ended(
    receiver: UcxTransport, child: SendingChild, num_turns: int
) -> None:
    """The drain proof: a source that hangs in mid-message, is cut off, and continues much later."""
    operations, targets = start_receiving(receiver, child)
    child.process.send_signal(signal.SIGSTOP)
    for _ in range(num_turns):
        receiver.progress()
    receiver.close_peer(operations[0].peer)
    progress_until_ended(receiver, operations)
    for target in targets:
        target[:] = b"\xee" * NUM_BYTES
    child.process.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        receiver.progress()
    assert all(target == b"\xee" * NUM_BYTES for target in targets)


def test_a_source_that_hangs_in_mid_message_is_cut_off(
    profile: TransportProfile, receiver: UcxTransport
) -> None:
    """It acts like a source on a network that loses every packet: no error ever occurs. On a busy
    machine all may have been sent when the signal comes; then another one hangs."""
    lost: list[Operation] = []
    for _ in range(5):
        child = SendingChild(profile, NUM_BYTES, NUM_MESSAGES)
        try:
            operations, _ = start_receiving(receiver, child)
            child.process.send_signal(signal.SIGSTOP)
            progress_until_ended(receiver, operations)
        finally:
            child.stop()
        lost = [operation for operation in operations if operation.state is OperationState.FAILED]
        if lost:
            break
    assert lost
    assert all(isinstance(operation.error, PeerLostError) for operation in lost)
    assert not lost[0].peer.alive


class BrokenEndpoint:
    """An endpoint that UCX finds broken while sends are under way, which it never completes."""

    def __init__(self) -> None:
        self.alive = True
        self.requests: list[EndlessRequest] = []

    def tag_send(self, *_: object) -> "EndlessRequest":
        self.requests.append(EndlessRequest())
        return self.requests[-1]

    def close_blocking(self, *_: object) -> None:
        """Do nothing, as UCXX does after an error of the endpoint."""


@dataclass
class EndlessRequest:
    completed: bool = False


def test_sends_that_ucx_never_completes_fail_with_their_connection(
    receiver: UcxTransport, child: SendingChild
) -> None:
    peer = receiver.connect(child.address)
    endpoint = BrokenEndpoint()
    peer.endpoint = cast(UcxEndpoint, endpoint)
    sends = [receiver.send(peer, PREFIX + i, pattern(NUM_BYTES, i)) for i in range(2)]
    assert receiver.progress() == []
    endpoint.alive = False
    progress_until_ended(receiver, sends)
    assert {send.state for send in sends} == {OperationState.FAILED}
    assert all(isinstance(send.error, PeerLostError) for send in sends)
    assert receiver.num_pending == 0
    endpoint.requests[0].completed = True  # too late to be an end of its own
    assert receiver.progress() == []


def test_a_live_source_delivers_everything(receiver: UcxTransport, child: SendingChild) -> None:
    operations, targets = start_receiving(receiver, child)
    progress_until_ended(receiver, operations)
    assert all(operation.state is OperationState.DONE for operation in operations)
    assert all(target == bytes([CHILD_FILL]) * NUM_BYTES for target in targets)


def open_files() -> dict[str, str]:
    """Return the targets of this process's descriptors. Threads of other tests may close some
    meanwhile."""
    files = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            files[name] = os.readlink(f"/proc/self/fd/{name}")
    return files


def listening_addresses() -> set[tuple[str, int]]:
    """Return the IPv4 addresses and ports this process listens on."""
    inodes = set(open_files().values())
    addresses = set()
    with open("/proc/self/net/tcp") as table:
        for line in list(table)[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                host, _, port = fields[1].partition(":")
                addresses.add((socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)))
    return addresses


@contextlib.contextmanager
def opened_ports() -> Iterator[set[int]]:
    """Collect the ports that are opened for listening in the block."""
    before, ports = listening_addresses(), set[int]()
    yield ports
    ports.update(port for _, port in listening_addresses() - before)


def unacknowledged_limits_ms(ports: Collection[int]) -> dict[str, int]:
    """Return TCP_USER_TIMEOUT of both ends of this process's connections to these ports, by
    socket."""
    limits = {}
    for name, target in open_files().items():
        if not target.startswith("socket:"):
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as found:
            if (found.family, found.type) != (socket.AF_INET, socket.SOCK_STREAM):
                continue
            # It has no peer if it listens.
            if not {found.getsockname()[1], found.getpeername()[1]}.isdisjoint(ports):
                limits[target] = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    return limits


def test_tcp_does_not_try_for_longer_than_its_limit() -> None:
    """The limit is set on both ends of a handoff's connections, also those that the peer has
    opened, which have no handle here; and on no other connection, as a computing peer reads nothing
    for a while."""
    with opened_ports() as stage_ports:
        stages = [
            UcxStageChannel(rank=rank, max_frame_bytes=4096, profile=TransportProfile.TCP)
            for rank in range(2)
        ]
    for stage in stages:
        stage.connect([stage.address for stage in stages], forming_of(1, 2))
    deadline = time.monotonic() + 60
    for sender, receiver in ((0, 1), (1, 0)):  # each has a connection of its own
        stages[sender].send(receiver, bytearray(100), timeout_s=60)
        while stages[receiver].receive(sender, timeout_s=0.05) is None:
            stages[sender].check(receiver)
            assert time.monotonic() < deadline
    with opened_ports() as ports:
        pair = Pair(
            *(UcxTransport(profile=TransportProfile.TCP, clock=SystemClock()) for _ in range(2))
        )
    pair.finish(
        pair.right.post_receive(pair.to_left, PREFIX, poisoned(100_000)),
        pair.left.send(pair.to_right, PREFIX, pattern(100_000)),
    )
    while 0 in (limits := list(unacknowledged_limits_ms(ports).values())):
        pair.settle(0.1)
        assert time.monotonic() < deadline, limits
    assert set(limits) == {round(UNACKNOWLEDGED_S * 1e3)}
    assert len(limits) >= 2
    assert set(unacknowledged_limits_ms(stage_ports).values()) == {0}
    pair.left.close()
    pair.right.close()
    for stage in stages:
        stage.close()


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 4096, bytes(range(256)) * 1024, b""]
)
def test_garbage_on_the_tcp_port_neither_crashes_nor_hangs(garbage: bytes) -> None:
    before = listening_addresses()
    left, right = (
        UcxTransport(profile=TransportProfile.TCP, clock=SystemClock()) for _ in range(2)
    )
    pair = Pair(left, right)
    with contextlib.ExitStack() as clients:
        addresses = listening_addresses() - before
        assert addresses
        for address in addresses:
            client = clients.enter_context(socket.create_connection(address, timeout=60))
            client.settimeout(0.2)
            with contextlib.suppress(OSError):  # it may hang up on us, as it should
                client.sendall(garbage)
        pair.settle(0.2)
        target = poisoned(100_000)
        pair.finish(
            right.post_receive(pair.to_left, PREFIX, target),
            left.send(pair.to_right, PREFIX, pattern(100_000)),
        )
        assert target == pattern(100_000)
    pair.settle(0.1)
    left.close()
    right.close()


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Leave this process without free descriptors inside the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_open_connections_continue_without_a_free_descriptor() -> None:
    """Connections to other ports of a process may take all there are; the handoff's thread survives
    it."""
    clock = ManualClock()
    pair = Pair(*(UcxTransport(profile=TransportProfile.TCP, clock=clock) for _ in range(2)))
    other = UcxTransport(profile=TransportProfile.TCP, clock=clock)
    for seed in (1, 2):  # the first message opens the connections
        target = poisoned(100_000)
        with no_descriptor_left() if seed == 2 else contextlib.nullcontext():
            clock.advance(2 * SOCKET_CHECK_S)
            pair.finish(
                pair.right.post_receive(pair.to_left, PREFIX + seed, target),
                pair.left.send(pair.to_right, PREFIX + seed, pattern(100_000, seed)),
            )
            if seed == 2:
                with pytest.raises(PeerLostError, match="open files"):
                    pair.left.connect(other.address)
        assert target == pattern(100_000, seed)
    for transport in (pair.left, pair.right, other):
        transport.close()


def test_only_slow_transports_are_worth_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="transfer"):
        for profile in PROFILES:
            UcxTransport(profile=profile, clock=SystemClock()).close()
    records = [record for record in caplog.records if record.name.startswith("transfer.")]
    assert [record.levelname for record in records] == ["INFO", "WARNING"]
    assert "posix/memory" in records[0].getMessage()
    assert "tcp/" in records[1].getMessage()


def test_auto_takes_shared_memory_unless_the_operator_chose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    assert ucx_options(TransportProfile.AUTO)["TLS"] == "posix,tcp"
    monkeypatch.setenv("UCX_TLS", "rc,posix")
    assert "TLS" not in ucx_options(TransportProfile.AUTO)
    assert ucx_options(TransportProfile.TCP)["TLS"] == "tcp"


def test_a_transport_that_is_not_there_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "nonesuch")
    with pytest.raises(ConfigError, match="auto"):
        UcxTransport(profile=TransportProfile.AUTO, clock=SystemClock())


def test_live_devices_are_read_from_the_description() -> None:
    info = "#   resource 0  :  md 0  dev 0  flags -- tcp/eth0\n#   resource 2  :  md 1  dev 2  flags -- posix/memory\n"
    assert live_devices(info) == [("tcp", "eth0"), ("posix", "memory")]


def test_transports_that_cannot_be_opened_are_a_config_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A /dev/shm that cannot be written is found out here."""

    def fail(ucx: UcxLibrary, context: object, binding: object) -> None:
        raise ucx.error("Shared memory error")

    monkeypatch.setattr("transfer.ucx.settings._open_worker", fail)
    with pytest.raises(
        ConfigError, match=r"UCX cannot open its transports \(.*\): Shared memory error"
    ):
        UcxTransport(profile=TransportProfile.SHM, clock=SystemClock())
