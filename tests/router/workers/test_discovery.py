"""Workers found by DNS and by Kubernetes: they appear, drain, vanish and come back, and no stream
is cut."""

import asyncio
import random
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from router.config import RouterConfig
from router.workers.discovery import (
    DiscoveryOptions,
    DnsSource,
    ServiceTarget,
    Source,
    StaticSource,
    parse_target,
)
from router.workers.endpoints import EndpointSource
from router.workers.worker_set import open_source
from runtime.config import Address
from runtime.errors import ConfigError
from runtime.observe.metrics.router import RouterMetrics
from runtime.process.announce import Announcement, write_announcement
from tests.router.harness import Discovered, eventually, running_router, token_request
from tests.support.network.authority import Authority
from tests.support.router.fake_workers import (
    Fabric,
    FakeDecode,
    FakePrefill,
    Journal,
    Point,
    expected_tokens,
)
from tests.support.router.kube import READY, FakeApi, endpoint_slice, fake_api

TERMINATING = {
    "ready": True,
    "serving": True,
    "terminating": True,
}  # as with publishNotReadyAddresses
NOT_READY = {"ready": False, "serving": False, "terminating": False}


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("10.0.0.7:7000", Address("10.0.0.7", 7000)),
        ("[fd00::1]:7000", Address("fd00::1", 7000)),
        ("dns:///prefill.baton.svc:7000", Address("prefill.baton.svc", 7000)),
        ("k8s:///baton/prefill:grpc", ServiceTarget("baton", "prefill", "grpc")),
        ("k8s:///prefill:7000", ServiceTarget("", "prefill", "7000")),
        ("file:///run/prefill-0.json", Path("/run/prefill-0.json")),
    ],
)
def test_targets_name_places(text: str, place: object) -> None:
    assert parse_target(text) == place


@pytest.mark.parametrize(
    "text",
    [
        "prefill",
        "dns:///prefill",
        "dns://8.8.8.8/prefill:7000",
        "k8s:///prefill",
        "k8s:///a/b/c:grpc",
        "k8s:///:grpc",
        "etcd:///prefill:1",
        "dns:///pre..fill:1",
        f"dns:///{'p' * 64}:1",
        "dns:///pre fill:1",
    ],
)
def test_an_invalid_target_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_target(text, field="prefill")
    assert refused.value.field == "prefill"
    assert text.rpartition("///")[2] in str(refused.value)


async def test_a_file_names_its_worker_once_it_announces_itself(tmp_path: Path) -> None:
    seen, file = Seen(), tmp_path / "prefill-0.json"
    source = open_source(
        f"file://{file}", DiscoveryOptions(), seen.metrics.discovery_errors, random.Random()
    )
    running = asyncio.create_task(source.run(seen.found.append))
    await asyncio.sleep(0.1)
    assert not seen.found
    write_announcement(file, Announcement("127.0.0.1:4711", None, 1, "x"))
    async with asyncio.timeout(60):
        await running
    assert seen.found == [frozenset({"127.0.0.1:4711"})]


@dataclass
class Seen:
    """What a source found, newest last."""

    found: list[frozenset[str]] = field(default_factory=list)
    metrics: RouterMetrics = field(
        default_factory=lambda: RouterMetrics.create(CollectorRegistry())
    )

    def errors(self, kind: str) -> float:
        return float(self.metrics.discovery_errors.labels(kind)._value.get())

    async def until(self, *addresses: str) -> None:
        await eventually(
            lambda: self.found and self.found[-1] == frozenset(addresses), f"other than {addresses}"
        )


@asynccontextmanager
async def running(make: Callable[[Seen], Source]) -> AsyncIterator[Seen]:
    seen = Seen()
    task = asyncio.create_task(make(seen).run(seen.found.append))
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Resolver:
    """A resolver with scripted results."""

    def __init__(self) -> None:
        self.answer: list[str] | OSError = []
        self.num_asked = 0

    async def __call__(self, name: str, port: int) -> list[str]:
        self.num_asked += 1
        if isinstance(self.answer, OSError):
            raise self.answer
        return [f"{host}:{port}" for host in self.answer]


async def test_dns_follows_a_name_and_takes_silence_for_no_news() -> None:
    resolver = Resolver()
    resolver.answer = ["10.0.0.1"]
    name = Address("prefill.baton", 7000)
    async with running(
        lambda seen: DnsSource(name, 0.01, seen.metrics.discovery_errors, resolver, 0.1)
    ) as seen:
        await seen.until("10.0.0.1:7000")
        resolver.answer = ["10.0.0.2", "10.0.0.1"]
        await seen.until("10.0.0.1:7000", "10.0.0.2:7000")
        resolver.answer = socket.gaierror(socket.EAI_AGAIN, "try again")
        await eventually(lambda: seen.errors("dns") >= 2, "trust in the resolver")
        assert len(seen.found) == 2, "known workers stay while the source fails"
        resolver.answer = socket.gaierror(socket.EAI_NONAME, "no such name")
        await seen.until()
        resolver.answer = ["10.0.0.3"]
        await seen.until("10.0.0.3:7000")


async def test_an_empty_dns_response_removes_no_worker() -> None:
    resolver, name = Resolver(), Address("prefill.baton", 7000)
    resolver.answer = ["10.0.0.1"]
    async with running(
        lambda seen: DnsSource(name, 0.01, seen.metrics.discovery_errors, resolver)
    ) as seen:
        await seen.until("10.0.0.1:7000")
        resolver.answer, asked = [], resolver.num_asked
        await eventually(lambda: resolver.num_asked > asked + 5, "no further look")
        assert seen.found == [frozenset({"10.0.0.1:7000"})]
        resolver.answer = ["10.0.0.2"]
        await seen.until("10.0.0.2:7000")


def test_the_lookup_interval_finds_moved_workers_within_three_seconds() -> None:
    assert (
        DiscoveryOptions().interval_s
        == RouterConfig.model_fields["discovery_interval_s"].default
        == 2.0
    )


async def test_dns_uses_the_systems_resolver() -> None:
    metrics = RouterMetrics.create(CollectorRegistry())
    source = open_source(
        "dns:///localhost:7000", DiscoveryOptions(), metrics.discovery_errors, random.Random(0)
    )
    async with running(lambda _: source) as seen:
        await eventually(
            lambda: seen.found and "127.0.0.1:7000" in seen.found[0], "an answer without loopback"
        )
    assert open_source(
        "h:1", DiscoveryOptions(), metrics.discovery_errors, random.Random(0)
    ) == StaticSource("h:1")


def account(folder: Path, token: str = "secret-1", ca: bytes = b"") -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in (("token", token.encode()), ("namespace", b"baton"), ("ca.crt", ca)):
        (folder / f"{name}.new").write_bytes(content)
        (folder / f"{name}.new").rename(folder / name)  # at once, as the kubelet replaces it
    return folder


def options(api: FakeApi, folder: Path, scheme: str = "http") -> DiscoveryOptions:
    return DiscoveryOptions(
        kubernetes_api=f"{scheme}://127.0.0.1:{api.port}", service_account=account(folder)
    )


def endpoints(
    api: FakeApi, folder: Path, target: str = "k8s:///prefill:grpc"
) -> Callable[[Seen], Source]:
    return lambda seen: open_source(
        target, options(api, folder), seen.metrics.discovery_errors, random.Random(0)
    )


async def test_endpoints_appear_turn_unready_terminate_and_vanish(tmp_path: Path) -> None:
    async with fake_api() as api, running(endpoints(api, tmp_path)) as seen:
        await seen.until()
        api.put(
            endpoint_slice(
                "a", "prefill", ("10.0.0.1", READY), ("10.0.0.2", NOT_READY), ("10.0.0.3", {})
            )
        )
        await seen.until("10.0.0.1:7000", "10.0.0.3:7000")
        api.put(endpoint_slice("other", "decode", ("10.0.9.9", READY)))
        api.put(endpoint_slice("b", "prefill", ("10.0.0.4", READY), port=7001))
        await seen.until("10.0.0.1:7000", "10.0.0.3:7000", "10.0.0.4:7001")
        api.put(endpoint_slice("a", "prefill", ("10.0.0.1", TERMINATING), ("10.0.0.2", READY)))
        await seen.until("10.0.0.2:7000", "10.0.0.4:7001")
        api.bookmark()
        api.delete("b")
        await seen.until("10.0.0.2:7000")
        api.put(endpoint_slice("c", "prefill", ("fd00::1", READY)))
        await seen.until("10.0.0.2:7000", "[fd00::1]:7000")
        assert (api.lists, api.watches) == (1, 1), "one list, one watch"


async def test_a_port_by_number_and_a_namespace_by_name(tmp_path: Path) -> None:
    async with (
        fake_api() as api,
        running(endpoints(api, tmp_path, "k8s:///baton/prefill:9090")) as seen,
    ):
        api.put(endpoint_slice("a", "prefill", ("10.0.0.1", READY)))
        await seen.until("10.0.0.1:9090")


async def test_an_expired_version_is_listed_again_without_losing_workers(tmp_path: Path) -> None:
    async with fake_api() as api, running(endpoints(api, tmp_path)) as seen:
        api.put(endpoint_slice("a", "prefill", ("10.0.0.1", READY)))
        await seen.until("10.0.0.1:7000")
        api.slices["a"] = endpoint_slice(
            "a", "prefill", ("10.0.0.2", READY)
        )  # changed without a watch
        api.forget_history()
        await seen.until("10.0.0.2:7000")
        api.put(endpoint_slice("b", "prefill", ("10.0.0.3", READY)))
        await seen.until("10.0.0.2:7000", "10.0.0.3:7000")
        assert frozenset() not in seen.found[1:]
        assert seen.errors("kubernetes") == 0, "Gone is no error"


async def test_a_lost_connection_keeps_known_workers_and_is_retried(tmp_path: Path) -> None:
    async with fake_api() as api, running(endpoints(api, tmp_path)) as seen:
        api.put(endpoint_slice("a", "prefill", ("10.0.0.1", READY)))
        await seen.until("10.0.0.1:7000")
        await api.stop()
        await eventually(lambda: seen.errors("kubernetes") >= 2, "trust in the server")
        assert seen.found[-1] == {"10.0.0.1:7000"}
        api.slices["a"] = endpoint_slice("a", "prefill", ("10.0.0.1", READY), ("10.0.0.2", READY))
        await api.start()
        await seen.until("10.0.0.1:7000", "10.0.0.2:7000")


async def test_pauses_between_attempts_grow(tmp_path: Path) -> None:
    async with fake_api() as api:
        api.refusal = 503
        async with running(endpoints(api, tmp_path)) as seen:
            await eventually(lambda: len(api.requests) == 4, "too few attempts")
            for (before, after), pause_s in zip(
                pairwise(api.asked_at_s), (0.2, 0.4, 0.8), strict=True
            ):
                assert after - before > 0.8 * pause_s, "a pause varies by a fifth"
            assert not seen.found


async def test_a_token_that_was_replaced_is_used_from_the_next_connection_on(
    tmp_path: Path,
) -> None:
    async with fake_api() as api, running(endpoints(api, tmp_path)) as seen:
        await seen.until()
        api.token = "secret-2"
        api.cut()
        await eventually(lambda: seen.errors("kubernetes") >= 2, "trust in the old token")
        account(tmp_path, "secret-2")
        api.put(endpoint_slice("a", "prefill", ("10.0.0.1", READY)))
        await seen.until("10.0.0.1:7000")


async def test_a_watch_goes_on_with_the_token_that_replaced_an_expired_one(
    tmp_path: Path,
) -> None:
    """The connection lives on, and nothing fails in between."""
    async with fake_api() as api, running(endpoints(api, tmp_path)) as seen:
        api.put(endpoint_slice("a", "prefill", ("10.0.0.1", READY)))
        await seen.until("10.0.0.1:7000")
        for number in (2, 3):
            await eventually(lambda: api.watches == number - 1, "no watch")  # noqa: B023
            api.token = f"secret-{number}"
            account(tmp_path, api.token)
            api.end_watches()
            api.put(endpoint_slice("a", "prefill", (f"10.0.0.{number}", READY)))
            await seen.until(f"10.0.0.{number}:7000")
        assert (api.lists, api.watches) == (1, 3)
        assert seen.errors("kubernetes") == 0


async def test_the_server_is_checked_against_the_service_accounts_authority(tmp_path: Path) -> None:
    authority, stranger = Authority(), Authority("stranger")
    files = authority.files(tmp_path / "server", "kubernetes")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    assert files.cert is not None
    context.load_cert_chain(files.cert, files.key)
    async with fake_api(context) as api:
        api.put(endpoint_slice("a", "prefill", ("10.0.0.1", READY)))
        told = options(api, tmp_path / "account", "https")
        account(tmp_path / "account", ca=stranger.pem)

        def source(seen: Seen) -> Source:
            return EndpointSource(
                ServiceTarget("", "prefill", "grpc"),
                told,
                seen.metrics.discovery_errors,
                random.Random(0),
            )

        async with running(source) as seen:
            await eventually(lambda: seen.errors("kubernetes") >= 1, "trust in a stranger")
            assert not api.requests, "the token is not shown to a stranger"
            account(tmp_path / "account", ca=authority.pem)
            await seen.until("10.0.0.1:7000")


class Cluster:
    """Fakes that a fake API server names to a router."""

    def __init__(self, api: FakeApi, folder: Path) -> None:
        fabric, self.journal = Fabric(), Journal()
        self.prefill = FakePrefill("p", fabric, self.journal)
        self.pools = [FakeDecode(f"d{i}", fabric, self.journal) for i in range(2)]
        self.api = api
        self.discovered = Discovered(
            ("k8s:///prefill:grpc",), ("k8s:///decode:grpc",), options(api, folder)
        )

    async def add(self, pool: FakeDecode) -> None:
        """Start a worker and add it to the API server."""
        await pool.start()
        self.api.put_worker(pool.name, "decode", pool.address)


async def test_workers_come_and_go_under_a_running_router(tmp_path: Path) -> None:
    async with fake_api() as api:
        cluster = Cluster(api, tmp_path)
        first, second = cluster.pools
        async with running_router(cluster.prefill, discovered=cluster.discovered) as router:
            api.put_worker("p", "prefill", cluster.prefill.address)
            await cluster.add(first)
            await eventually(lambda: not router.directory.pair_problem(), "absence of a pair")
            assert (
                await router.ask(token_request([1], max_tokens=3))
            ).token_ids == expected_tokens([1], 3)

            # One more; the first one drains. What streams there goes on.
            await cluster.add(second)
            go_on = asyncio.Event()
            first.at(Point.TOKEN, lambda _: go_on.wait())
            second.serving = False
            await eventually(
                lambda: any(
                    w.address == second.address and w.problem == "draining"
                    for w in router.directory.workers
                ),
                "a report of the second",
            )
            streaming = asyncio.create_task(router.ask(token_request([2], max_tokens=5)))
            await eventually(lambda: first.open_requests, "the stream")
            second.serving = True
            api.put_worker("d0", "decode", first.address, TERMINATING)
            await eventually(
                lambda: any(w.unlisted for w in router.directory.workers),
                "trust in what terminates",
            )
            for _ in range(4):
                await router.ask(token_request([3], max_tokens=1))
            assert len(first.open_requests) == 1, "it got nothing new"

            # It vanishes from discovery altogether: still not cut. Then it is unused, and it is
            # forgotten.
            api.delete("d0")
            await asyncio.sleep(0.1)
            assert first.address in {worker.address for worker in router.directory.workers}
            go_on.set()
            assert (await streaming).token_ids == expected_tokens([2], 5)
            await eventually(
                lambda: first.address not in {w.address for w in router.directory.workers},
                "memory of it",
            )
            await first.die()

            # Back under the same address: another life.
            before = first.incarnation
            await cluster.add(first)
            await eventually(
                lambda: any(w.incarnation == first.incarnation for w in router.directory.workers),
                "it",
            )
            assert first.incarnation != before
            api.delete("d1")
            await eventually(
                lambda: second.address not in {w.address for w in router.directory.workers},
                "the second",
            )
            assert (
                await router.ask(token_request([4], max_tokens=3))
            ).token_ids == expected_tokens([4], 3)
            await router.assert_nothing_left()
            await first.die()
            await second.die()


async def test_a_worker_named_again_before_it_was_forgotten_is_the_one_it_was(
    tmp_path: Path,
) -> None:
    async with fake_api() as api:
        cluster = Cluster(api, tmp_path)
        pool, _ = cluster.pools
        async with running_router(cluster.prefill, discovered=cluster.discovered) as router:
            api.put_worker("p", "prefill", cluster.prefill.address)
            await cluster.add(pool)
            await eventually(lambda: not router.directory.pair_problem(), "absence of a pair")
            go_on = asyncio.Event()
            pool.at(Point.TOKEN, lambda _: go_on.wait())
            streaming = asyncio.create_task(router.ask(token_request([2], max_tokens=5)))
            await eventually(lambda: pool.open_requests, "the stream")
            worker = router.directory.workers[1]
            api.put_worker("d0", "decode", pool.address, NOT_READY)
            await eventually(lambda: router.directory.pair_problem(), "trust in what is not ready")
            api.put_worker("d0", "decode", pool.address)
            await eventually(lambda: not router.directory.pair_problem(), "absence of a pair")
            assert router.directory.workers[1] is worker
            go_on.set()
            assert (await streaming).token_ids == expected_tokens([2], 5)
            await pool.die()
