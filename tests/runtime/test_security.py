"""Certificates, tokens and roles at a server's door, by clients that are gRPC's own."""

import asyncio
import re
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from prometheus_client import CollectorRegistry

from pool.stage.config import WorkerConfig
from protos import generation_pb2 as pb
from protos import generation_pb2_grpc, worker_pb2, worker_pb2_grpc
from router.config import RouterConfig
from runtime.errors import (
    ConfigError,
    InvalidRequestError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from runtime.observe.metrics.calls import RpcMetrics
from runtime.rpc.client import open_channel, open_sync_channel
from runtime.rpc.server import GrpcServer, ServerOptions
from runtime.rpc.status import error_from_rpc
from runtime.security.access import (
    Caller,
    ChannelSecurity,
    ClientCertificates,
    PeerRole,
    ServerSecurity,
    TlsConfig,
    client_security,
)
from runtime.security.certificates import CertificateStore, TlsFiles
from runtime.security.tokens import OwnToken, TokenList
from tests.support.network.authority import DAY, Authority
from tests.support.network.door import ask, plain_client, serving
from tests.support.network.ports import taken_port
from tests.support.router.generation import SERVICE, EchoGeneration, serve_echo

TOKEN, OTHER_TOKEN = "first-token-of-the-tests", "second-token-of-the-tests"


@pytest.fixture
def authority() -> Authority:
    return Authority()


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"# who: everybody\n{TOKEN}\n\n{OTHER_TOKEN}\n")
    return path


async def test_tls_serves_only_clients_that_trust_it(authority: Authority, tmp_path: Path) -> None:
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
        async with plain_client(
            address, files.ca.read_bytes(), known.key, known.certificate
        ) as channel:
            assert await ask(channel) == "echo"


async def test_mutual_tls_refuses_strangers_expired_and_nameless(
    authority: Authority, tmp_path: Path
) -> None:
    async with serving(ServerSecurity(authority.store(tmp_path, "router"))) as address:
        known = authority.issue("client")
        async with plain_client(address, authority.pem, known.key, known.certificate) as channel:
            assert await ask(channel) == "echo"
        expired = authority.issue("client", lifetime=(-2 * DAY, -DAY))
        foreign = Authority().issue("router")
        for key, certificate in (
            (None, None),
            (expired.key, expired.certificate),
            (foreign.key, foreign.certificate),
        ):
            async with plain_client(address, authority.pem, key, certificate) as channel:
                with pytest.raises(UnavailableError):
                    await ask(channel)


async def test_a_server_with_an_expired_certificate_is_not_trusted(
    authority: Authority, tmp_path: Path
) -> None:
    expired = authority.store(tmp_path, "router", lifetime=(-2 * DAY, timedelta(seconds=-1)))
    async with (
        serving(ServerSecurity(expired, ClientCertificates.NONE)) as address,
        plain_client(address, authority.pem) as channel,
    ):
        with pytest.raises(UnavailableError, match=r"(?i)expired"):
            await ask(channel)


async def test_a_channel_to_a_role_accepts_that_role_only(
    authority: Authority, tmp_path: Path
) -> None:
    own = ChannelSecurity(authority.store(tmp_path / "router", "router"))
    async with serving(ServerSecurity(authority.store(tmp_path / "prefill", "prefill"))) as address:
        async with open_channel(address, security=own.to(PeerRole.PREFILL)) as channel:
            assert await ask(channel) == "echo"
        async with open_channel(address, security=own.to(PeerRole.DECODE)) as channel:
            with pytest.raises(UnavailableError, match="Hostname"):
                await ask(channel)


@pytest.mark.parametrize(
    ("names", "lets_in"),
    [
        (("router",), True),
        (("operator",), True),
        (("spiffe://example.org/baton/router",), True),
        (("decode",), False),
        (("client",), False),
        (("router.example.org",), False),
        (("spiffe://example.org/evil/router",), False),
        (("spiffe://example.org/baton/router/x",), False),
    ],
)
async def test_the_role_in_the_certificate_decides(
    authority: Authority,
    tmp_path: Path,
    names: tuple[str, ...],
    lets_in: bool,  # noqa: FBT001
) -> None:
    security = ServerSecurity(
        authority.store(tmp_path / "prefill", "prefill"), pool=PeerRole.PREFILL
    )
    caller = authority.issue(*names)
    async with (
        serving(security) as address,
        plain_client(address, authority.pem, caller.key, caller.certificate) as channel,
    ):
        call = worker_pb2_grpc.WorkerStub(channel).Watch(
            worker_pb2.WatchRequest(interval_s=1), timeout=60
        )
        if lets_in:
            assert await call.read() is not grpc.aio.EOF
            return
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        error = error_from_rpc(refused.value)
        assert isinstance(error, PermissionDeniedError)
        assert "/baton.v1.Worker/Watch may be called by router or operator" in str(error)


@pytest.mark.parametrize(
    ("name", "is_operator"), [("operator", True), ("router", True), ("client", False)]
)
async def test_an_operator_is_known_by_its_certificate(
    authority: Authority, tmp_path: Path, name: str, *, is_operator: bool
) -> None:
    callers: list[Caller] = []
    security = ServerSecurity(authority.store(tmp_path, "router"))

    class Noted(EchoGeneration):
        async def GetModelInfo(
            self,
            request: pb.GetModelInfoRequest,
            context: Any,  # noqa: ANN401
        ) -> pb.GetModelInfoResponse:
            callers.append(security.caller(context))
            return pb.GetModelInfoResponse(model="echo")

    server, address = await serve_echo(Noted(), security=security)
    shown = authority.issue(name)
    async with plain_client(address, authority.pem, shown.key, shown.certificate) as channel:
        assert await ask(channel) == "echo"
    await server.drain(grace_s=0)
    assert [(caller.is_operator, caller.account) for caller in callers] == [
        (is_operator, f"certificate:{name}")
    ]


async def test_a_method_that_there_is_not_is_unimplemented(token_file: Path) -> None:
    """This holds for all callers: clients of reflection fall back to another version of it on this
    status."""
    async with (
        serving(ServerSecurity(tokens=TokenList(token_file))) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        for path in ("/baton.v1.Generation/Stop", "/other.Service/Call"):
            call: Any = channel.unary_unary(path)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(b"")
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_tokens(authority: Authority, tmp_path: Path, token_file: Path) -> None:
    security = ServerSecurity(
        authority.store(tmp_path, "router"), ClientCertificates.NONE, TokenList(token_file)
    )
    async with serving(security) as address, plain_client(address, authority.pem) as channel:
        for token in (TOKEN, OTHER_TOKEN):
            assert await ask(channel, ("authorization", f"Bearer {token}")) == "echo"
        assert await ask(channel, ("authorization", f"bearer {TOKEN}")) == "echo"
        wrong = [
            (),
            (("authorization", f"Bearer {TOKEN}x"),),
            (("authorization", TOKEN),),
            (("authorization", "Bearer "),),
            (("authorization", f"Basic {TOKEN}"),),
            (("authorization", "Bearer # who: everybody"),),
        ]
        for metadata in wrong:
            with pytest.raises(UnauthenticatedError) as refused:
                await ask(channel, *metadata)
            assert TOKEN not in str(refused.value)
        call = generation_pb2_grpc.GenerationStub(channel).GetModelInfo(pb.GetModelInfoRequest())
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_named_token_makes_its_holder_an_operator(tmp_path: Path) -> None:
    """It opens the methods for operators and no others; a name that is not set opens none."""
    path = tmp_path / "tokens"
    path.write_text(f"planner {TOKEN}\nalice {OTHER_TOKEN}\n")
    security = ServerSecurity(tokens=TokenList(path), operators=frozenset({"planner"}))
    async with serving(security) as address, grpc.aio.insecure_channel(address) as channel:
        watch = worker_pb2_grpc.WorkerStub(channel).Watch

        async def status(call: Any) -> grpc.StatusCode:  # noqa: ANN401 - any kind of call
            try:
                await asyncio.wait_for(call.read(), 10)
            except grpc.aio.AioRpcError as error:
                return error.code()
            return grpc.StatusCode.OK

        def bearer(token: str) -> dict[str, Any]:
            return {"metadata": (("authorization", f"Bearer {token}"),)}

        request = worker_pb2.WatchRequest(interval_s=1)
        assert await status(watch(request, **bearer(TOKEN))) is grpc.StatusCode.OK
        for other, code in (
            (bearer(OTHER_TOKEN), grpc.StatusCode.PERMISSION_DENIED),
            (bearer(TOKEN + "x"), grpc.StatusCode.UNAUTHENTICATED),
            ({}, grpc.StatusCode.PERMISSION_DENIED),
        ):
            assert await status(watch(request, **other)) is code


@pytest.mark.parametrize(
    ("token", "tenant", "expected"),
    [
        (TOKEN, None, Caller("token:gate", frozenset({"gate"}), is_operator=True)),
        (TOKEN, "acme", Caller("token:gate/tenant:acme", frozenset({"acme"}))),
        (
            TOKEN,
            "org/ann@acme.example",
            Caller("token:gate/tenant:org/ann@acme.example", frozenset({"org/ann@acme.example"})),
        ),
        (OTHER_TOKEN, "acme", Caller("token:alice", frozenset({"alice"}))),
    ],
)
def test_a_trusted_client_names_the_tenant_of_a_call(
    tmp_path: Path, token: str, tenant: str | None, expected: Caller
) -> None:
    """The tenant takes its place, without its rights; the word of others counts for nothing."""
    assert tenants_of(tmp_path).caller(called(token, tenant)) == expected


@pytest.mark.parametrize("tenant", ["", "a" * 65, "a b", "a\nb", b"acme"])
def test_a_tenants_name_is_bounded(tmp_path: Path, tenant: str | bytes) -> None:
    with pytest.raises(InvalidRequestError, match="baton-tenant: must be 1 to 64"):
        tenants_of(tmp_path).caller(called(TOKEN, tenant))


def tenants_of(folder: Path) -> ServerSecurity:
    path = folder / "tokens"
    path.write_text(f"gate {TOKEN}\nalice {OTHER_TOKEN}\n")
    return ServerSecurity(
        tokens=TokenList(path),
        operators=frozenset({"gate"}),
        tenant_sources=frozenset({"gate"}),
    )


def called(token: str, tenant: str | bytes | None) -> Any:  # noqa: ANN401 - a context of gRPC
    metadata: list[tuple[str, str | bytes]] = [("authorization", f"Bearer {token}")]
    if tenant is not None:
        metadata.append(("baton-tenant", tenant))
    return SimpleNamespace(invocation_metadata=lambda: tuple(metadata), auth_context=dict)


@pytest.mark.parametrize("method", ["/baton.v1.Decode/Serve", "/baton.v1.Pipeline/Join"])
def test_an_operators_token_opens_nothing_between_workers(tmp_path: Path, method: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"planner {TOKEN}\n")
    security = ServerSecurity(tokens=TokenList(path), operators=frozenset({"planner"}))
    context: Any = SimpleNamespace(
        invocation_metadata=lambda: (("authorization", f"Bearer {TOKEN}"),),
        auth_context=dict,
    )
    security.check("/baton.v1.Worker/SetRoles", context)
    with pytest.raises(PermissionDeniedError):
        security.check(method, context)


async def test_health_and_reflection_ask_for_no_token(
    authority: Authority, tmp_path: Path, token_file: Path
) -> None:
    security = ServerSecurity(
        authority.store(tmp_path, "router"), ClientCertificates.NONE, TokenList(token_file)
    )
    async with serving(security) as address:
        async with plain_client(address, authority.pem) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(  # type: ignore[attr-defined]  # stubs lack it
                health_pb2.HealthCheckRequest()
            )
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with grpc.secure_channel(address, grpc.ssl_channel_credentials(authority.pem)) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            assert SERVICE in await asyncio.to_thread(database.get_services)


@pytest.fixture
def door() -> Iterator[str]:
    with taken_port("127.0.0.1") as taken:
        yield f"127.0.0.1:{taken + 1}"  # unused while the one before it is held


async def test_the_plain_port_serves_health_only(
    authority: Authority, tmp_path: Path, door: str
) -> None:
    server = GrpcServer(
        ServerOptions(listen="127.0.0.1:0", health_listen=door),
        services=(SERVICE,),
        metrics=RpcMetrics.create(CollectorRegistry()),
        security=ServerSecurity(authority.store(tmp_path, "router")),
    )
    generation_pb2_grpc.add_GenerationServicer_to_server(EchoGeneration(), server.grpc)
    await server.start()
    async with grpc.aio.insecure_channel(door) as probe:
        watch = health_pb2_grpc.HealthStub(probe).Watch(  # type: ignore[attr-defined]  # stubs lack it
            health_pb2.HealthCheckRequest(service=SERVICE)
        )
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
            await GrpcServer(
                ServerOptions(listen="127.0.0.1:0", health_listen=door),
                services=(SERVICE,),
                metrics=RpcMetrics.create(CollectorRegistry()),
            ).start()
    assert refused.value.field == "health_listen"


async def test_tokens_protect_methods_for_roles(token_file: Path) -> None:
    async with serving(ServerSecurity(tokens=TokenList(token_file))) as address:
        async with grpc.aio.insecure_channel(address) as channel:
            call = worker_pb2_grpc.WorkerStub(channel).Watch(
                worker_pb2.WatchRequest(interval_s=1),
                metadata=(("authorization", f"Bearer {TOKEN}"),),
            )
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.read()
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_token_is_withdrawn_by_rewriting_the_file(token_file: Path) -> None:
    async with (
        serving(ServerSecurity(tokens=TokenList(token_file))) as address,
        open_channel(address, security=ChannelSecurity(token=OwnToken(token_file))) as ours,
        grpc.aio.insecure_channel(address) as stubborn,
    ):
        assert (
            await ask(ours) == await ask(stubborn, ("authorization", f"Bearer {TOKEN}")) == "echo"
        )
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


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no token"),
        ("# nothing\n\n", "no token"),
        ("short\n", "at least 16"),
        (f"{TOKEN} {TOKEN}", "without spaces"),
        ("ключключключключ", "ASCII"),
    ],
)
def test_token_files_that_cannot_work(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem) as refused:
        TokenList(path)
    assert refused.value.field == "token_file"
    assert not text or text.strip() not in str(refused.value)


def test_certificate_files_that_cannot_work(authority: Authority, tmp_path: Path) -> None:
    files, other = (
        authority.files(tmp_path / "a", "router"),
        authority.files(tmp_path / "b", "router"),
    )
    garbage = tmp_path / "garbage.pem"
    garbage.write_bytes(b"\xff nothing")
    cases: list[tuple[TlsFiles, str]] = [
        (TlsFiles(tmp_path / "none.pem", files.cert, files.key), "tls_ca"),
        (TlsFiles(garbage), "tls_ca"),
        (TlsFiles(files.ca, garbage, files.key), "tls_cert"),
        (TlsFiles(files.ca, files.cert, other.key), "tls_key"),
        (TlsFiles(files.ca, files.cert), "tls_key"),
        (TlsFiles(files.ca, None, files.key), "tls_cert"),
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
    with pytest.raises(
        ConfigError, match="TLS between roles needs tls_cert, tls_key and tls_ca"
    ) as refused:
        TlsConfig(**{name: tmp_path / name for name in given}).certificates()  # type: ignore[arg-type]
    assert refused.value.field not in given
    assert TlsConfig().certificates() is None


async def test_weak_settings_on_public_addresses_are_logged(
    authority: Authority, tmp_path: Path, token_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, tokens = authority.store(tmp_path, "router"), TokenList(token_file)
    expected = {
        ServerSecurity(): "open to every caller",
        ServerSecurity(store, ClientCertificates.NONE): "open to every caller",
        ServerSecurity(tokens=tokens): "accepting tokens in plain text",
        ServerSecurity(store): "",
        ServerSecurity(store, ClientCertificates.NONE, tokens): "",
    }
    for security, warning in expected.items():
        for listen in ("127.0.0.1:0", "0.0.0.0:0"):
            caplog.clear()
            server = GrpcServer(
                ServerOptions(listen=listen),
                services=(),
                security=security,
                metrics=RpcMetrics.create(CollectorRegistry()),
            )
            await server.start()
            await server.drain(grace_s=0)
            said = [
                record.getMessage()
                for record in caplog.records
                if record.name.startswith("runtime.")
            ]
            assert len(said) == bool(warning and listen.startswith("0.")), said
            assert all(f"0.0.0.0:0 is {warning}" in line for line in said)


@pytest.mark.parametrize("config", [RouterConfig, WorkerConfig])
def test_secrets_are_settings_that_name_a_file(
    config: type[RouterConfig] | type[WorkerConfig],
) -> None:
    secret = [
        name
        for name in config.model_fields
        if re.search(r"(key|secret|password)s?$|token_file", name)
    ]
    assert "tls_key" in secret
    for name in secret:
        assert config.model_fields[name].annotation == Path | None, (
            f"{name} would put a secret into flags and logs"
        )
