"""Addresses that UCX listens on: the settings, and the sockets that a worker really opens."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from pool.stage.config import WorkerConfig
from runtime.clock import SystemClock
from runtime.config import load
from runtime.errors import ConfigError
from tests.support.network.ports import taken_port
from tests.support.transfer.handoff import wait_until
from transfer.transport.binding import NetworkBinding
from transfer.ucx import settings as ucx_settings
from transfer.ucx.settings import TransportProfile
from transfer.ucx.stage_channel import UcxStageChannel
from transfer.ucx.transport import UcxTransport

LOOPBACK = "0100007F"  # 127.0.0.1 as the kernel's table writes it


def listening() -> set[tuple[str, int]]:
    """Return (address, port) of every TCP socket this process listens on, from the kernel's
    table."""
    own = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # threads that other tests have left may close theirs
            own.add(os.readlink(entry))
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {
        (row[1].split(":")[0], int(row[1].split(":")[1], 16))
        for row in rows
        if row[3] == "0A" and f"socket:[{row[9]}]" in own
    }


@pytest.fixture
def taken() -> Iterator[int]:
    with taken_port("0.0.0.0") as port:
        yield port


@pytest.mark.parametrize("profile", [each for each in TransportProfile if not each.reaches_devices])
def test_ucx_listens_on_the_interface_and_in_the_ports_alone(profile: TransportProfile) -> None:
    before, binding = listening(), NetworkBinding.parse("lo", "24100-24163")
    transport = UcxTransport(profile=profile, clock=SystemClock(), binding=binding)
    channel = UcxStageChannel(rank=0, max_frame_bytes=1024, profile=profile, binding=binding)
    opened = listening() - before
    transport.close()
    channel.close()
    assert len(opened) == 2
    assert {address for address, _ in opened} == {LOOPBACK}
    assert all(24100 <= port <= 24163 for _, port in opened)


def test_a_taken_port_of_the_range_is_passed_over(taken: int) -> None:
    before = listening()
    transport = UcxTransport(
        profile=TransportProfile.TCP,
        clock=SystemClock(),
        binding=NetworkBinding.parse("lo", f"{taken}-{taken + 1}"),
    )
    opened = listening() - before
    transport.close()
    assert opened == {(LOOPBACK, taken + 1)}


def test_a_range_without_a_free_port_is_refused_at_once(taken: int) -> None:
    with pytest.raises(ConfigError, match=f"no port of {taken}-{taken} is free") as refused:
        UcxTransport(
            profile=TransportProfile.TCP,
            clock=SystemClock(),
            binding=NetworkBinding.parse("", f"{taken}-{taken}"),
        )
    assert refused.value.field == "transport_ports"


def test_a_port_that_remembers_its_connections_is_taken() -> None:
    """UCX does not reuse it and would search for ever."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        port: int = server.getsockname()[1]
        server.accept()[0].close()  # the side that closes first keeps TIME_WAIT
        assert client.recv(1) == b""
    wait_until(
        lambda: (
            ("06", f"{port:04X}")
            in {
                (row.split()[3], row.split()[1].partition(":")[2])
                for row in Path("/proc/net/tcp").read_text().splitlines()
            }
        )
    )
    with pytest.raises(ConfigError, match=f"no port of {port}-{port} is free"):
        NetworkBinding.parse("", f"{port}-{port}").check()


@pytest.mark.parametrize(
    "neighbors", [0, 1]
)  # of one port UCX says that it is taken, for several it searches
def test_a_port_that_is_taken_after_the_check_is_refused_in_time(
    taken: int, monkeypatch: pytest.MonkeyPatch, neighbors: int
) -> None:
    monkeypatch.setattr(ucx_settings, "OPEN_WORKER_S", 0.5)
    monkeypatch.setattr(NetworkBinding, "check", lambda binding: None)
    with socket.socket() as other:
        other.bind(("0.0.0.0", taken + 1))
        other.listen()
        with pytest.raises(
            ConfigError, match=f"no port of {taken}-{taken + neighbors} is free"
        ) as refused:
            UcxTransport(
                profile=TransportProfile.TCP,
                clock=SystemClock(),
                binding=NetworkBinding.parse("lo", f"{taken}-{taken + neighbors}"),
            )
    assert refused.value.field == "transport_ports"
    wait_until(
        lambda: "ucx-worker" not in {thread.name for thread in threading.enumerate()}
    )  # it found one after all


@pytest.mark.parametrize("interface", ["nope0", "lo,nope0", "mlx5_99:1"])
def test_an_interface_that_does_not_exist_is_refused(interface: str) -> None:
    with pytest.raises(ConfigError, match=r"no network device .* here, only .*\blo\b") as refused:
        UcxTransport(
            profile=TransportProfile.TCP,
            clock=SystemClock(),
            binding=NetworkBinding.parse(interface, ""),
        )
    assert refused.value.field == "transport_interface"


@pytest.mark.parametrize("ports", ["7300", "7363-7300", "0-10", "7300-65536", "a-b", "-5", "7300-"])
def test_ports_that_are_no_range_are_refused_by_field(ports: str) -> None:
    with pytest.raises(ConfigError, match="LOW-HIGH with 1 <= LOW <= HIGH <= 65535") as refused:
        load(WorkerConfig, section="decode", flags={"model": "m", "transport_ports": ports})
    assert refused.value.field == "transport_ports"


def test_a_list_of_interfaces_with_a_gap_is_refused() -> None:
    with pytest.raises(ConfigError, match="names separated by commas"):
        NetworkBinding.parse("lo,,eth0", "")
