"""Requirements of a process for its callers, and the credentials that it presents to servers.

Only this module builds credentials.

    class PrefillConfig(TlsConfig): ...                  settings tls_cert, tls_key, tls_ca
    tls = config.certificates()                          None: plain text
    GrpcServer(..., security=ServerSecurity(tls, pool=PeerRole.PREFILL))
    open_channel(address, security=ChannelSecurity(tls).to(PeerRole.DECODE))

Between roles a certificate is checked for the role's name, not for the address: the addresses of
workers change and are not known when certificates are issued.

One table defines the access to every method for all servers. A caller's roles come from its
certificate: a DNS name that is a role (`router`), or a URI `spiffe://DOMAIN/baton/ROLE`. Without
certificates callers have no names, and the network must restrict access (docs/security.md).
"""

import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import grpc
from pydantic import Field

from runtime.config import AddressField, Config, parse_address
from runtime.errors import ConfigError, PermissionDeniedError
from runtime.security.certificates import CertificateStore, TlsFiles
from runtime.security.tenants import tenant_of
from runtime.security.tokens import AUTHORIZATION_KEY, OwnToken, TokenList


class PeerRole(StrEnum):
    """Role that a certificate can give its holder."""

    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"
    OPERATOR = "operator"  # a person who inspects workers and flushes their caches


class Access(StrEnum):
    """Group of callers that may call a method."""

    OPEN = "open"  # every caller, without a token
    CLIENT = "client"  # every caller that the server's token list, if it has one, accepts
    ROUTER = "router"
    WATCHER = "watcher"  # routers and operators
    POOL = "pool"  # stages of the server's own pool
    POOLS = "pools"  # pools of either role
    NOBODY = "nobody"


@dataclass(frozen=True)
class Caller:
    """A client, identified by its credentials.

    `identity` separates the data of different clients; clients without credentials share the empty
    one. `names` are for settings. `address` is the origin of the connection. `is_operator`: it may
    call methods for operators.
    """

    identity: str = ""
    names: frozenset[str] = frozenset()
    address: str = ""
    is_operator: bool = False

    @property
    def account(self) -> str:
        """Return the key of its share of resources: its identity, or else its address."""
        return self.identity or self.address


ANYBODY = Caller()

METHODS: Mapping[str, Access] = {
    "/baton.v1.Generation/Generate": Access.CLIENT,
    "/baton.v1.Generation/Abort": Access.CLIENT,
    "/baton.v1.Generation/GetModelInfo": Access.CLIENT,
    "/baton.v1.Generation/GetClusterStatus": Access.CLIENT,
    "/baton.v1.Generation/GetLoad": Access.CLIENT,
    "/baton.v1.Generation/FlushCaches": Access.WATCHER,
    "/baton.v1.Adapters/LoadAdapter": Access.WATCHER,
    "/baton.v1.Adapters/UnloadAdapter": Access.WATCHER,
    "/baton.v1.Adapters/ListAdapters": Access.WATCHER,
    "/baton.v1.Caches/ListCaches": Access.WATCHER,
    "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics": Access.CLIENT,
    "/baton.v1.Prefill/Serve": Access.ROUTER,
    "/baton.v1.Decode/Serve": Access.ROUTER,
    "/baton.v1.Worker/Watch": Access.WATCHER,
    "/baton.v1.Worker/FlushCache": Access.WATCHER,
    "/baton.v1.Worker/SetRoles": Access.WATCHER,
    "/baton.v1.Pipeline/Join": Access.POOL,
    "/baton.v1.Lending/Lend": Access.POOLS,
}
# Services of other packages. A row for a method overrides the row of its service.
SERVICES: Mapping[str, Access] = {
    "vllm.grpc.engine.VllmEngine": Access.CLIENT,
    "vllm.grpc.engine.VllmEngine/FlushCache": Access.WATCHER,
    # it exposes tokens of all clients' prompts
    "vllm.grpc.engine.VllmEngine/SubscribeKvEvents": Access.WATCHER,
    "grpc.channelz.v1.Channelz": Access.WATCHER,
    "grpc.health.v1.Health": Access.OPEN,
    "grpc.reflection.v1alpha.ServerReflection": Access.OPEN,
    "grpc.reflection.v1.ServerReflection": Access.OPEN,
}
_WATCHERS = (PeerRole.ROUTER, PeerRole.OPERATOR)
_SPIFFE_ID = re.compile(r"spiffe://[a-z0-9._-]+/baton/([a-z]+)")


def access_to(method: str) -> Access:
    """Return the access group of a method, given as a full path such as "/baton.v1.Prefill/Serve".

    A method in neither table is closed.
    """
    path = method.removeprefix("/")
    service = path.partition("/")[0]
    return METHODS.get(method) or SERVICES.get(path) or SERVICES.get(service, Access.NOBODY)


def certified(auth_context: Mapping[str, Iterable[bytes]]) -> Caller:
    """Return the caller that a verified certificate names.

    DNS names and URIs identify it, or else its common name.
    """
    named = [*auth_context.get("peer_dns", ()), *auth_context.get("peer_uri", ())]
    names = sorted(
        {
            name.decode(errors="replace")
            for name in named or auth_context.get("x509_common_name", ())
        }
    )
    return Caller("certificate:" + "|".join(names), frozenset(names)) if names else ANYBODY


def network_of(address: str) -> bytes:
    """Return the bytes that identify a peer: its IPv4 address, or the network of its IPv6 address."""
    if ":" not in address:
        return socket.inet_pton(socket.AF_INET, address)
    packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0])
    is_mapped = packed.startswith(bytes(10) + b"\xff\xff")
    return packed[12:] if is_mapped else packed[:8]


def address_of(peer: str) -> str:
    """Return the address of a peer in gRPC's notation, without its port.

    An IPv6 address is reduced to its network.
    """
    host = unquote(peer.partition(":")[2].rpartition(":")[0]).strip("[]")
    try:
        return network_of(host).hex()
    except OSError:
        return peer  # a socket without an address


def roles_of(auth_context: Mapping[str, Iterable[bytes]]) -> frozenset[PeerRole]:
    """Return the roles of a verified certificate, from the properties that gRPC extracted."""
    named = [name.decode(errors="replace") for name in auth_context.get("peer_dns", ())]
    for uri in auth_context.get("peer_uri", ()):
        if found := _SPIFFE_ID.fullmatch(uri.decode(errors="replace")):
            named.append(found[1])
    return frozenset(role for role in PeerRole if role.value in named)


def check_role(method: str, roles: frozenset[PeerRole], *, pool: PeerRole | None) -> None:
    """Check that one of the roles may call the method. Raises PermissionDeniedError.

    `pool` is the role of the pool that the server leads, if any.
    """
    rules: Mapping[Access, tuple[PeerRole, ...]] = {
        Access.ROUTER: (PeerRole.ROUTER,),
        Access.WATCHER: _WATCHERS,
        Access.POOL: () if pool is None else (pool,),
        Access.POOLS: () if pool is None else (PeerRole.PREFILL, PeerRole.DECODE),
    }
    allowed = rules.get(access_to(method), ())
    if roles.isdisjoint(allowed):
        may = " or ".join(allowed) or "no caller"
        held = ", ".join(sorted(roles)) or "no role"
        raise PermissionDeniedError(
            f"{method} may be called by {may}; the caller's certificate names {held}"
        )


Context = grpc.aio.ServicerContext[Any, Any]


class ClientCertificates(StrEnum):
    """Whether a TLS server requires client certificates."""

    REQUIRED = "required"
    NONE = "none"


class TlsConfig(Config):
    """TLS settings of a process that serves and calls others: all three files, or plain text."""

    health_listen: AddressField | None = Field(
        default=None,
        description="HOST:PORT that serves only health, in plain text, for probes without TLS",
    )
    tls_cert: Path | None = Field(
        default=None, description="PEM certificate of this process; its DNS name is its role"
    )
    tls_key: Path | None = Field(default=None, description="PEM key of --tls-cert, not encrypted")
    tls_ca: Path | None = Field(
        default=None, description="PEM certificates of the authority of all roles"
    )

    def certificates(self) -> CertificateStore | None:
        """Return the certificates, or None without any of the files.

        Raises ConfigError if some files are missing or cannot be used.
        """
        files = {name: getattr(self, name) for name in ("tls_cert", "tls_key", "tls_ca")}
        missing = [name for name, path in files.items() if path is None]
        if len(missing) == len(files):
            return None
        if missing:
            raise ConfigError(
                f"{missing[0]} is missing: TLS between roles needs tls_cert, tls_key and tls_ca",
                field=missing[0],
            )
        return CertificateStore(TlsFiles(files["tls_ca"], files["tls_cert"], files["tls_key"]))


@dataclass(frozen=True)
class ServerSecurity:
    """Requirements of a server.

    `pool` is the role whose stages may join. `tokens` are those of clients of the public API;
    holders of those named in `operators` may do what the role operator may. Clients named in
    `tenant_sources` may name the tenant that a call is for.
    """

    certificates: CertificateStore | None = None
    client_certificates: ClientCertificates = ClientCertificates.REQUIRED
    tokens: TokenList | None = None
    pool: PeerRole | None = None
    operators: frozenset[str] = frozenset()
    tenant_sources: frozenset[str] = frozenset()

    @property
    def names_clients(self) -> bool:
        """Return whether `caller` can distinguish clients."""
        has_names = (
            self.certificates is not None
            and self.client_certificates is ClientCertificates.REQUIRED
        )
        return has_names or self.tokens is not None

    @property
    def weakness(self) -> str:
        """Return the weakness of a server outside loopback, or "" if there is none."""
        if not self.names_clients:
            return "open to every caller that can reach it: it requires neither certificates nor tokens"
        if self.certificates is None:
            return "accepting tokens in plain text: everyone on the network path can read them"
        return ""

    def credentials(self) -> grpc.ServerCredentials | None:
        """Return the server's credentials, or None for plain text."""
        if self.certificates is None:
            return None
        required = self.client_certificates is ClientCertificates.REQUIRED
        return self.certificates.server_credentials(require_client_certificate=required)

    def check(self, method: str, context: Context) -> None:
        """Check that the caller may call `method`.

        Raises UnauthenticatedError or PermissionDeniedError.
        """
        access = access_to(method)
        if access is Access.CLIENT:
            if self.tokens is not None:
                self.tokens.check(_authorization(context))
        elif access is Access.OPEN or (self.certificates is None and self.tokens is None):
            return
        elif access is not Access.WATCHER or not self._is_operators_token(context):
            check_role(method, roles_of(context.auth_context()), pool=self.pool)

    def caller(self, context: Context) -> Caller:
        """Return the client, after `check`.

        It is identified by its token, else by its certificate, else by its address. A tenant that
        it may name counts in its place.

        Raises:
            InvalidRequestError: the tenant's name cannot be used.
        """
        caller = self._holder(context)
        if self.tenant_sources.isdisjoint(caller.names):
            return caller
        tenant = tenant_of(_metadata(context))
        if tenant is None:
            return caller
        return Caller(f"{caller.identity}/tenant:{tenant}", frozenset({tenant}))

    def _holder(self, context: Context) -> Caller:
        """Return the client that holds the token or certificate, or has the address."""
        roles = (
            frozenset[PeerRole]() if self.certificates is None else roles_of(context.auth_context())
        )
        is_operator = not roles.isdisjoint(_WATCHERS) or (
            self.certificates is None and self.tokens is None
        )
        if self.tokens is not None:
            name = self.tokens.check(_authorization(context))
            is_operator = is_operator or name in self.operators
            return Caller(f"token:{name}", frozenset({name}), is_operator=is_operator)
        shown = ANYBODY if self.certificates is None else certified(context.auth_context())
        if not shown.identity:
            shown = Caller(address=address_of(context.peer()))
        return replace(shown, is_operator=is_operator)

    def _is_operators_token(self, context: Context) -> bool:
        """Return whether the caller presents a token of `operators`.

        Raises UnauthenticatedError for one that is not on the list.
        """
        authorization = _authorization(context)
        if self.tokens is None or not self.operators or authorization is None:
            return False
        return self.tokens.check(authorization) in self.operators


def _metadata(context: Context) -> Mapping[str, str | bytes]:
    return dict(context.invocation_metadata() or ())


def _authorization(context: Context) -> str | None:
    authorization = _metadata(context).get(AUTHORIZATION_KEY)
    return authorization if isinstance(authorization, str) else None


@dataclass(frozen=True)
class ChannelSecurity:
    """Credentials of a caller, and the servers that it accepts.

    `server_name` is the DNS name that the server's certificate must have; if empty, the host of the
    address.
    """

    certificates: CertificateStore | None = None
    token: OwnToken | None = None
    server_name: str = ""

    @property
    def is_plain(self) -> bool:
        return self.certificates is None and self.token is None

    def shown(self) -> object:
        """Return the current certificates: the same object until the files change."""
        return None if self.certificates is None else self.certificates.current()

    def to(self, role: PeerRole) -> "ChannelSecurity":
        """Return the security of a channel to a server with this role."""
        return replace(self, server_name=role.value)

    def check_target(self, address: str) -> None:
        """Raise ConfigError if the token would be readable on the network."""
        if (
            self.token is not None
            and self.certificates is None
            and not parse_address(address).is_loopback
        ):
            raise ConfigError(
                f"token_file: the token would travel to {address} in plain text; give --tls-ca",
                field="token_file",
            )


def client_security(
    *,
    tls_ca: Path | None = None,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    token_file: Path | None = None,
    server_name: str = "",
) -> ChannelSecurity:
    """Return the security of a client of the public API; `tls_ca` enables TLS.

    Raises ConfigError naming the file that is missing or cannot be used.
    """
    if tls_ca is None and (tls_cert is not None or tls_key is not None):
        raise ConfigError("tls_ca is missing: it defines which servers to trust", field="tls_ca")
    certificates = None if tls_ca is None else CertificateStore(TlsFiles(tls_ca, tls_cert, tls_key))
    return ChannelSecurity(
        certificates, None if token_file is None else OwnToken(token_file), server_name
    )


OPEN_SERVER = ServerSecurity()
PLAIN_CHANNEL = ChannelSecurity()
