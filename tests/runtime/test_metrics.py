import resource
import select
import socket
import struct
import threading
import time
import urllib.request
from socketserver import TCPServer

import pytest

from router.request.retries import MoveReason
from router.workers.worker import WorkerRole
from runtime import errors
from runtime.errors import BatonError, ConfigError
from runtime.observe.exposition import ACCEPT_PAUSE_S, MAX_SCRAPES, Exposition, new_registry
from runtime.observe.metrics.calls import RpcMetrics
from runtime.observe.metrics.handoffs import SESSION_FAILURES, ArrivalMetrics, HandoffMetrics
from runtime.observe.metrics.instruments import FAILURES
from runtime.observe.metrics.pools import LeaderMetrics, PoolMetrics
from runtime.observe.metrics.router import ClientMetrics, RouterMetrics
from runtime.observe.metrics.stages import StageMetrics


def test_exposition_serves_counted_values() -> None:
    registry = new_registry(role="decode", version="1.2.3")
    transfer = HandoffMetrics.create(registry)
    transfer.bytes_moved.labels("kv").inc(4096)
    exposition = Exposition.start(registry, port=0)
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{exposition.port}/metrics", timeout=60
        ) as answer:
            text = answer.read().decode()
        with pytest.raises(ConfigError, match=str(exposition.port)):
            Exposition.start(registry, port=exposition.port)
    finally:
        exposition.close()
    assert 'baton_kv_transfer_bytes_total{kind="kv"} 4096.0' in text
    assert 'baton_build_info{role="decode",version="1.2.3"} 1.0' in text
    assert "process_resident_memory_bytes" in text


def test_connections_that_ask_for_nothing_keep_no_scrape_out(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Each would have a thread and a descriptor of the worker for as long as it likes."""
    exposition = Exposition.start(new_registry(role="decode", version="1.2.3"), port=0)
    before = threading.active_count()
    try:
        idle = [
            socket.create_connection(("127.0.0.1", exposition.port), timeout=60)
            for _ in range(8 * MAX_SCRAPES)
        ]
        junk = socket.create_connection(("127.0.0.1", exposition.port), timeout=60)
        junk.sendall(bytes(100_000))
        junk.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )  # it leaves by a reset
        junk.close()
        with urllib.request.urlopen(
            f"http://127.0.0.1:{exposition.port}/metrics", timeout=60
        ) as answer:
            assert b"baton_build_info" in answer.read()
        assert [connection.recv(1) for connection in idle[: 6 * MAX_SCRAPES]] == [
            b""
        ] * 6 * MAX_SCRAPES
        deadline_s = time.monotonic() + 60
        while (
            threading.active_count() - before > 2 * MAX_SCRAPES
        ):  # those cut off end in their time
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        for connection in idle:
            connection.close()
    finally:
        exposition.close()
    assert capfd.readouterr() == ("", "")


def test_without_a_free_descriptor_scrapes_wait_and_nothing_spins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attempts: list[None] = []
    original = TCPServer.get_request

    def counted(server: TCPServer) -> tuple[socket.socket, object]:
        attempts.append(None)
        return original(server)

    monkeypatch.setattr(TCPServer, "get_request", counted)
    exposition = Exposition.start(new_registry(role="decode", version="1.2.3"), port=0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        with socket.socket() as client:
            resource.setrlimit(resource.RLIMIT_NOFILE, (client.fileno() + 1, hard))
            client.settimeout(60)
            began_s = time.monotonic()
            client.connect(("127.0.0.1", exposition.port))
            client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            # Several, unless what other tests have left frees a descriptor meanwhile.
            while len(attempts) < 4 and not select.select([client], [], [], ACCEPT_PAUSE_S)[0]:
                assert time.monotonic() - began_s < 60
            assert len(attempts) <= (time.monotonic() - began_s) / ACCEPT_PAUSE_S + 1
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert client.recv(12) == b"HTTP/1.0 200"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        exposition.close()


def test_a_worker_can_hold_all_its_sets_in_one_registry() -> None:
    for kinds in (
        (RpcMetrics, RouterMetrics, ClientMetrics),
        (RpcMetrics, StageMetrics, LeaderMetrics, PoolMetrics, HandoffMetrics, ArrivalMetrics),
    ):
        registry = new_registry(role="x", version="0")
        for kind in kinds:
            kind.create(registry)
        names = [
            family.name
            for family in registry.collect()
            if not family.name.startswith(("process", "python"))
        ]
        assert all(name.startswith("baton_") for name in names)


def test_failures_are_zero_before_the_first() -> None:
    """A series that appears with its first failure has no increase that an alert could see."""
    registry = new_registry(role="router", version="1")
    for kind in (RouterMetrics, HandoffMetrics, ArrivalMetrics):
        kind.create(registry)
    found: dict[str, set[tuple[str, ...]]] = {}
    for family in registry.collect():
        for sample in family.samples:
            if (
                family.name.startswith("baton_")
                and sample.name.endswith("_total")
                and sample.labels
            ):
                assert sample.value == 0
                found.setdefault(family.name, set()).add(tuple(sample.labels.values()))
    sessions = {(reason,) for reason in SESSION_FAILURES}
    assert found["baton_kv_transfer_failures"] == sessions | {("source_replaced",)}
    assert found["baton_handshake_failures"] == sessions
    assert found["baton_router_retries"] == {
        (role.value, reason) for role in WorkerRole for reason in FAILURES
    }
    assert found["baton_migrations"] == {
        (move.value, end) for move in MoveReason for end in ("resumed", "failed")
    }
    assert found["baton_discovery_errors"] == {("dns",), ("kubernetes",)}
    assert found["baton_local_prefill"] == {
        ("preempted",),
        ("short_rest",),
        ("own_prompt",),
        ("in_place",),
    }
    assert registry.get_sample_value("baton_e2e_seconds_count", {"outcome": "failed"}) == 0


def test_failures_have_reasons_of_errors() -> None:
    reasons = {
        kind.reason
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, BatonError)
    }
    assert set(FAILURES) <= reasons
