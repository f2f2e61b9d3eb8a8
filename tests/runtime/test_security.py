"""Certificates, tokens and roles at a server's door, by clients that are gRPC's own."""

import asyncio
import re
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from prometheus_client import CollectorRegistry

from pool.stage.config import WorkerConfig
from protos import generation_pb2 as pb
from protos import generation_pb2_grpc, worker_pb2, worker_pb2_grpc
from router.config import RouterConfig
from runtime.certificates import CertificateStore, TlsFiles
from runtime.client import open_channel, open_sync_channel
from runtime.errors import ConfigError, PermissionDeniedError, UnauthenticatedError, UnavailableError
from runtime.metrics import RpcMetrics
from runtime.security import ChannelSecurity, ClientCertificates, PeerRole, ServerSecurity, TlsConfig, client_security
from runtime.server import GrpcServer, ServerOptions
from runtime.status import error_from_rpc
from runtime.tokens import OwnToken, TokenList
from tests.support.network.authority import DAY, Authority, write
from tests.support.network.ports import taken_port
from tests.support.router.fake_workers import CachelessWorker
from tests.support.router.generation import SERVICE, EchoGeneration

TOKEN, OTHER_TOKEN = "first-token-of-the-tests", "second-token-of-the-tests"


class Watched(CachelessWorker):
    """Says which certificate its caller shows."""

    async def Watch(self, request: worker_pb2.WatchRequest, context: grpc.aio.ServicerContext[Any, Any],
                    ) -> AsyncIterator[worker_pb2.WatchResponse]:
        (pem,) = context.auth_context().get("x509_pem_cert", [b""])
        serial_number = x509.load_pem_x509_certificate(bytes(pem)).serial_number if pem else 0
        yield worker_pb2.WatchResponse(info=worker_pb2.WorkerInfo(incarnation=str(serial_number)))


@asynccontextmanager
async def serving(security: ServerSecurity) -> AsyncIterator[str]:
    """An echo server behind `security`; its address."""
    server = GrpcServer(ServerOptions(listen="127.0.0.1:0"), services=(SERVICE,), security=security,
                        metrics=RpcMetrics.create(CollectorRegistry()))
    generation_pb2_grpc.add_GenerationServicer_to_server(EchoGeneration(), server.grpc)
    worker_pb2_grpc.add_WorkerServicer_to_server(Watched(), server.grpc)
    yield await server.start()
    await server.drain(grace_s=0)


@pytest.fixture
def authority() -> Authority:
    return Authority()


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"# who: everybody\n{TOKEN}\n\n{OTHER_TOKEN}\n")
    return path


async def ask(channel: grpc.aio.Channel, *metadata: tuple[str, str]) -> str:
    """The model's name, or the typed error behind the status."""
    stub = generation_pb2_grpc.GenerationStub(channel)
    try:
        info: pb.GetModelInfoResponse = await stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=metadata, timeout=60)
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from None
    return info.model


def plain_client(address: str, ca: bytes, key: bytes | None = None,
                 certificate: bytes | None = None) -> grpc.aio.Channel:
    """A channel as an outside client makes it."""
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca, key, certificate),
                                   [("grpc.use_local_subchannel_pool", 1)])


async def test_tls_serves_who_trusts_it_and_nobody_else(authority: Authority, tmp_path: Path) -> None:
    security = ServerSecurity(authority.store(tmp_path, "router"), ClientCertificates.NONE)
    async with serving(security) as address:
        async with plain_client(address, authority.pem) as channel:
            assert await ask(channel) == "echo"
        async with plain_client(address, Authority().pem) as stranger:
            with pytest.raises(UnavailableError, match="certificate"):
                await ask(stranger)
        async with grpc.aio.insecure_channel(address) as in_the_clear:
            with pytest.raises(UnavailableError):
                await ask(in_the_clear)


async def test_bundles_may_have_comments(authority: Authority, tmp_path: Path) -> None:
    files = authority.files(tmp_path, "router")
    files.ca.write_bytes("# Főtanúsítvány\n".encode() + Authority("another").pem + authority.pem)
    async with serving(ServerSecurity(CertificateStore(files))) as address:
        known = authority.issue("client")
        async with plain_client(address, files.ca.read_bytes(), known.key, known.certificate) as channel:
            assert await ask(channel) == "echo"


async def test_mutual_tls_refuses_strangers_expired_and_nameless(authority: Authority, tmp_path: Path) -> None:
    async with serving(ServerSecurity(authority.store(tmp_path, "router"))) as address:
        known = authority.issue("client")
        async with plain_client(address, authority.pem, known.key, known.certificate) as channel:
            assert await ask(channel) == "echo"
        expired = authority.issue("client", lifetime=(-2 * DAY, -DAY))
        foreign = Authority().issue("router")
        for key, certificate in ((None, None), (expired.key, expired.certificate), (foreign.key, foreign.certificate)):
            async with plain_client(address, authority.pem, key, certificate) as channel:
                with pytest.raises(UnavailableError):
                    await ask(channel)


async def test_a_server_whose_certificate_has_expired_is_not_believed(authority: Authority, tmp_path: Path) -> None:
    expired = authority.store(tmp_path, "router", lifetime=(-2 * DAY, timedelta(seconds=-1)))
    async with (serving(ServerSecurity(expired, ClientCertificates.NONE)) as address,
                plain_client(address, authority.pem) as channel):
        with pytest.raises(UnavailableError, match=r"(?i)expired"):
            await ask(channel)


async def test_a_channel_to_a_role_accepts_that_role_only(authority: Authority, tmp_path: Path) -> None:
    own = ChannelSecurity(authority.store(tmp_path / "router", "router"))
    async with serving(ServerSecurity(authority.store(tmp_path / "prefill", "prefill"))) as address:
        async with open_channel(address, security=own.to(PeerRole.PREFILL)) as channel:
            assert await ask(channel) == "echo"
        async with open_channel(address, security=own.to(PeerRole.DECODE)) as channel:
            with pytest.raises(UnavailableError, match="Hostname"):
                await ask(channel)


@pytest.mark.parametrize(("names", "lets_in"), [
    (("router",), True), (("operator",), True), (("spiffe://example.org/baton/router",), True),
    (("decode",), False), (("client",), False), (("router.example.org",), False),
    (("spiffe://example.org/evil/router",), False), (("spiffe://example.org/baton/router/x",), False),
])
async def test_the_role_in_the_certificate_decides(authority: Authority, tmp_path: Path, names: tuple[str, ...],
                                                   lets_in: bool) -> None:  # noqa: FBT001
    security = ServerSecurity(authority.store(tmp_path / "prefill", "prefill"), pool=PeerRole.PREFILL)
    caller = authority.issue(*names)
    async with (serving(security) as address,
                plain_client(address, authority.pem, caller.key, caller.certificate) as channel):
        call = worker_pb2_grpc.WorkerStub(channel).Watch(worker_pb2.WatchRequest(interval_s=1), timeout=60)
        if lets_in:
            assert await call.read() is not grpc.aio.EOF
            return
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        error = error_from_rpc(refused.value)
        assert isinstance(error, PermissionDeniedError)
        assert "/baton.v1.Worker/Watch may be called by router or operator" in str(error)


async def test_tokens(authority: Authority, tmp_path: Path, token_file: Path) -> None:
    security = ServerSecurity(authority.store(tmp_path, "router"), ClientCertificates.NONE, TokenList(token_file))
    async with serving(security) as address, plain_client(address, authority.pem) as channel:
        for token in (TOKEN, OTHER_TOKEN):
            assert await ask(channel, ("authorization", f"Bearer {token}")) == "echo"
        assert await ask(channel, ("authorization", f"bearer {TOKEN}")) == "echo"
        wrong = [(), (("authorization", f"Bearer {TOKEN}x"),), (("authorization", TOKEN),),
                 (("authorization", "Bearer "),), (("authorization", f"Basic {TOKEN}"),),
                 (("authorization", "Bearer # who: everybody"),)]
        for metadata in wrong:
            with pytest.raises(UnauthenticatedError) as refused:
                await ask(channel, *metadata)
            assert TOKEN not in str(refused.value)
        call = generation_pb2_grpc.GenerationStub(channel).GetModelInfo(pb.GetModelInfoRequest())
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_health_and_reflection_ask_for_no_token(authority: Authority, tmp_path: Path, token_file: Path) -> None:
    security = ServerSecurity(authority.store(tmp_path, "router"), ClientCertificates.NONE, TokenList(token_file))
    async with serving(security) as address:
        async with plain_client(address, authority.pem) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(  # type: ignore[attr-defined]  # stubs lack it
                health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with grpc.secure_channel(address, grpc.ssl_channel_credentials(authority.pem)) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            assert SERVICE in await asyncio.to_thread(database.get_services)


@pytest.fixture
def door() -> Iterator[str]:
    with taken_port("127.0.0.1") as taken:
        yield f"127.0.0.1:{taken + 1}"  # which nobody takes while the one before it is held


async def test_the_plain_door_serves_health_and_nothing_else(authority: Authority, tmp_path: Path, door: str) -> None:
    server = GrpcServer(ServerOptions(listen="127.0.0.1:0", health_listen=door), services=(SERVICE,),
                        metrics=RpcMetrics.create(CollectorRegistry()),
                        security=ServerSecurity(authority.store(tmp_path, "router")))
    generation_pb2_grpc.add_GenerationServicer_to_server(EchoGeneration(), server.grpc)
    await server.start()
    async with grpc.aio.insecure_channel(door) as probe:
        watch = health_pb2_grpc.HealthStub(probe).Watch(  # type: ignore[attr-defined]  # stubs lack it
            health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await server.health.set_serving(SERVICE)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(ConfigError, match="does not offer"):
            await ask(probe)
        await server.drain(grace_s=0)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    with socket.create_server(("127.0.0.1", 0)) as held:
        door = f"127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(ConfigError) as refused:
            await GrpcServer(ServerOptions(listen="127.0.0.1:0", health_listen=door), services=(SERVICE,),
                             metrics=RpcMetrics.create(CollectorRegistry())).start()
    assert refused.value.field == "health_listen"


async def test_tokens_close_what_is_for_roles_only(token_file: Path) -> None:
    async with serving(ServerSecurity(tokens=TokenList(token_file))) as address:
        async with grpc.aio.insecure_channel(address) as channel:
            call = worker_pb2_grpc.WorkerStub(channel).Watch(worker_pb2.WatchRequest(interval_s=1),
                                                             metadata=(("authorization", f"Bearer {TOKEN}"),))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.read()
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_token_is_withdrawn_by_rewriting_the_file(token_file: Path) -> None:
    async with (serving(ServerSecurity(tokens=TokenList(token_file))) as address,
                open_channel(address, security=ChannelSecurity(token=OwnToken(token_file))) as ours,
                grpc.aio.insecure_channel(address) as stubborn):
        assert await ask(ours) == await ask(stubborn, ("authorization", f"Bearer {TOKEN}")) == "echo"
        replace_token(token_file, OTHER_TOKEN)
        assert await ask(ours) == "echo", "our client follows its file"
        with pytest.raises(UnauthenticatedError):
            await ask(stubborn, ("authorization", f"Bearer {TOKEN}"))


def replace_token(path: Path, token: str) -> None:
    path.write_text(f"{token}\n")


def test_a_token_never_travels_in_plain_text(token_file: Path) -> None:
    security = ChannelSecurity(token=OwnToken(token_file))
    for open_any in (open_channel, open_sync_channel):
        with pytest.raises(ConfigError, match="plain text") as refused:
            open_any("192.0.2.1:7000", security=security)
        assert refused.value.field == "token_file"


@pytest.mark.parametrize(("text", "problem"), [
    ("", "no token"), ("# nothing\n\n", "no token"), ("short\n", "at least 16"), (f"{TOKEN} {TOKEN}", "without spaces"),
    ("ключключключключ", "ASCII"),
])
def test_token_files_that_cannot_work(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem) as refused:
        TokenList(path)
    assert refused.value.field == "token_file"
    assert not text or text.strip() not in str(refused.value)


def test_certificate_files_that_cannot_work(authority: Authority, tmp_path: Path) -> None:
    files, other = authority.files(tmp_path / "a", "router"), authority.files(tmp_path / "b", "router")
    garbage = tmp_path / "garbage.pem"
    garbage.write_bytes(b"\xff nothing")
    cases: list[tuple[TlsFiles, str]] = [
        (TlsFiles(tmp_path / "none.pem", files.cert, files.key), "tls_ca"), (TlsFiles(garbage), "tls_ca"),
        (TlsFiles(files.ca, garbage, files.key), "tls_cert"), (TlsFiles(files.ca, files.cert, other.key), "tls_key"),
        (TlsFiles(files.ca, files.cert), "tls_key"), (TlsFiles(files.ca, None, files.key), "tls_cert"),
    ]
    for broken, field in cases:
        with pytest.raises(ConfigError, match=field) as refused:
            CertificateStore(broken)
        assert refused.value.field == field


def test_flags_of_a_client_that_cannot_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tls_ca is missing"):
        client_security(tls_cert=tmp_path / "cert.pem", tls_key=tmp_path / "key.pem")
    with pytest.raises(ConfigError, match="tls_ca: cannot read"):
        client_security(tls_ca=tmp_path / "none.pem")
    with pytest.raises(ConfigError, match="token_file: cannot read"):
        client_security(token_file=tmp_path / "none")


@pytest.mark.parametrize("given", [{"tls_cert"}, {"tls_ca", "tls_key"}, {"tls_ca", "tls_cert"}])
def test_a_role_has_all_three_files_or_none(tmp_path: Path, given: set[str]) -> None:
    with pytest.raises(ConfigError, match="TLS between roles needs tls_cert, tls_key and tls_ca") as refused:
        TlsConfig(**{name: tmp_path / name for name in given}).certificates()  # type: ignore[arg-type]
    assert refused.value.field not in given
    assert TlsConfig().certificates() is None


async def test_what_is_weak_beyond_this_machine_is_warned_of(authority: Authority, tmp_path: Path, token_file: Path,
                                                             caplog: pytest.LogCaptureFixture) -> None:
    store, tokens = authority.store(tmp_path, "router"), TokenList(token_file)
    expected = {
        ServerSecurity(): "open to everybody", ServerSecurity(store, ClientCertificates.NONE): "open to everybody",
        ServerSecurity(tokens=tokens): "asking for tokens in plain text", ServerSecurity(store): "",
        ServerSecurity(store, ClientCertificates.NONE, tokens): "",
    }
    for security, warning in expected.items():
        for listen in ("127.0.0.1:0", "0.0.0.0:0"):
            caplog.clear()
            server = GrpcServer(ServerOptions(listen=listen), services=(), security=security,
                                metrics=RpcMetrics.create(CollectorRegistry()))
            await server.start()
            await server.drain(grace_s=0)
            said = [record.getMessage() for record in caplog.records]
            assert len(said) == bool(warning and listen.startswith("0.")), said
            assert all(f"0.0.0.0:0 is {warning}" in line for line in said)


@pytest.mark.parametrize("config", [RouterConfig, WorkerConfig])
def test_secrets_are_settings_that_name_a_file(config: type[RouterConfig] | type[WorkerConfig]) -> None:
    secret = [name for name in config.model_fields if re.search(r"(key|secret|password)s?$|token_file", name)]
    assert "tls_key" in secret
    for name in secret:
        assert config.model_fields[name].annotation == Path | None, f"{name} would put a secret into flags and logs"


class Rotation:
    """Replaces the files of a server and of its client by those of another authority, both trusted for a while."""

    def __init__(self, folder: Path) -> None:
        self.old, self.new = Authority("old"), Authority("new")
        self.server, self.client = folder / "server", folder / "client"
        self.first = self.old.issue("prefill")
        self.second = self.new.issue("prefill")
        self.client_second = self.new.issue("router")
        write(self.server, self.old.pem, self.first)
        write(self.client, self.old.pem, self.old.issue("router"))

    def stores(self) -> tuple[CertificateStore, CertificateStore]:
        """Of server and client."""
        server, client = (CertificateStore(TlsFiles(folder / "ca.pem", folder / "cert.pem", folder / "key.pem"))
                          for folder in (self.server, self.client))
        return server, client

    def steps(self) -> Iterator[None]:
        """As the documentation says: trust both, change the certificates, trust the new one only."""
        both = self.old.pem + self.new.pem
        (self.server / "ca.pem").write_bytes(both)
        (self.client / "ca.pem").write_bytes(both)
        yield
        write(self.client, both, self.client_second)
        yield
        write(self.server, both, self.second)
        yield
        (self.server / "ca.pem").write_bytes(self.new.pem)
        (self.client / "ca.pem").write_bytes(self.new.pem)
        yield


async def served_serial(address: str) -> int:
    """Of the certificate that new connections see."""
    host, port = address.split(":")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return x509.load_der_x509_certificate(der).serial_number


async def test_rotation_under_load_fails_nothing(tmp_path: Path) -> None:
    rotation = Rotation(tmp_path)
    server_store, client_store = rotation.stores()
    security = ChannelSecurity(client_store).to(PeerRole.PREFILL)
    answered, stop = [0], asyncio.Event()

    async def load(channel: grpc.aio.Channel) -> None:
        while not stop.is_set():
            assert await ask(channel) == "echo"
            answered[0] += 1

    async def answered_more(count: int) -> None:
        target = answered[0] + count
        while answered[0] < target:  # noqa: ASYNC110 (what the other tasks count)
            await asyncio.sleep(0.005)

    async with (serving(ServerSecurity(server_store)) as address, open_channel(address, security=security) as channel,
                asyncio.timeout(55)):  # the prompt that hangs does so for a minute
        assert await served_serial(address) == rotation.first.serial_number
        held = generation_pb2_grpc.GenerationStub(channel).Generate(pb.GenerateRequest(text="hang"))
        await held.read()
        tasks = [asyncio.create_task(load(channel)) for _ in range(3)]
        for _ in rotation.steps():
            await answered_more(20)
        assert await served_serial(address) == rotation.second.serial_number
        shown = await anext(aiter(worker_pb2_grpc.WorkerStub(channel).Watch(worker_pb2.WatchRequest())))
        assert shown.info.incarnation == str(rotation.client_second.serial_number)
        stop.set()
        await asyncio.gather(*tasks)
        assert not held.done(), "the stream that began before the rotation still runs"
        held.cancel()
        old = rotation.old.issue("router")
        async with plain_client(address, rotation.new.pem, old.key, old.certificate) as outdated:
            with pytest.raises(UnavailableError):
                await ask(outdated)


async def test_threads_rotate_too(tmp_path: Path) -> None:
    rotation = Rotation(tmp_path)
    server_store, client_store = rotation.stores()
    security = ChannelSecurity(client_store).to(PeerRole.PREFILL)
    async with serving(ServerSecurity(server_store)) as address:
        def run() -> list[str]:
            with open_sync_channel(address, security=security) as channel:
                stub = generation_pb2_grpc.GenerationStub(channel)
                held = stub.Generate(pb.GenerateRequest(text="first hang"))
                seen = [next(held).chunk.text]
                for _ in rotation.steps():
                    seen.append(stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=60).model)
                seen.append(next(held).chunk.text)
                held.cancel()
                shown = next(worker_pb2_grpc.WorkerStub(channel).Watch(worker_pb2.WatchRequest()))
                return [*seen, shown.info.incarnation]

        assert await asyncio.to_thread(run) == ["first ", "echo", "echo", "echo", "echo", "hang ",
                                                str(rotation.client_second.serial_number)]


async def test_half_a_pair_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority = Authority()
    files = authority.files(tmp_path, "router")
    store = CertificateStore(files)
    first, second = store.current(), authority.issue("router")
    assert files.cert is not None
    assert files.key is not None
    files.cert.write_bytes(second.certificate)
    assert store.current() is first
    assert store.current() is first
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    files.key.write_bytes(second.key)
    assert (store.current().cert, store.current().key) == (second.certificate, second.key)


def test_a_store_may_be_read_by_many_threads(tmp_path: Path) -> None:
    authority = Authority()
    files = authority.files(tmp_path, "router")
    store, problems = CertificateStore(files), list[BaseException]()

    def read() -> None:
        try:
            for _ in range(200):
                store.current()
        except BaseException as error:  # noqa: BLE001
            problems.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        write(tmp_path, authority.pem, authority.issue("router"))
    for thread in threads:
        thread.join()
    assert problems == []
