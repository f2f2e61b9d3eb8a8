"""What a process requires of its callers, and what it shows to those it calls: the one place that
builds credentials.

    class PrefillConfig(TlsConfig): ...                  settings tls_cert, tls_key, tls_ca
    tls = config.certificates()                          None: plain text
    GrpcServer(..., security=ServerSecurity(tls, pool=PeerRole.PREFILL))
    open_channel(address, security=ChannelSecurity(tls).to(PeerRole.DECODE))

Between roles a certificate is checked for the role's name, not for the address: workers come and go
under addresses that cannot be put into a certificate beforehand.

Who may call which method is one table for all servers. A caller's roles are what its certificate
says: a DNS name that is a role (`router`) or a URI `spiffe://DOMAIN/baton/ROLE`. Without
certificates no caller has a name, and the network has to decide (docs/security.md).
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
from runtime.security.tokens import AUTHORIZATION_KEY, OwnToken, TokenList


class PeerRole(StrEnum):
    """What a certificate can name its holder."""

    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"
    OPERATOR = "operator"  # a person who looks at workers and empties their caches


class Access(StrEnum):
    """Who is let in."""

    OPEN = "open"  # all who can connect, without a token
    CLIENT = "client"  # all whom the server's token list, if it has one, lets in
    ROUTER = "router"
    WATCHER = "watcher"  # routers and operators
    POOL = "pool"  # stages of the server's own pool
    NOBODY = "nobody"


@dataclass(frozen=True)
class Caller:
    """A client, by what it has shown. `identity` keeps apart what belongs to different ones; all
    that have shown nothing share the empty one. `names` are for settings, `address` is where its
    connection comes from. `is_operator`: it may call what is for operators."""

    identity: str = ""
    names: frozenset[str] = frozenset()
    address: str = ""
    is_operator: bool = False

    @property
    def account(self) -> str:
        """What it takes and leaves to others is reckoned by: who it is, or else where it comes
        from."""
        return self.identity or self.address


ANYBODY = Caller()

METHODS: Mapping[str, Access] = {
    "/baton.v1.Generation/Generate": Access.CLIENT,
    "/baton.v1.Generation/Abort": Access.CLIENT,
    "/baton.v1.Generation/GetModelInfo": Access.CLIENT,
    "/baton.v1.Generation/GetClusterStatus": Access.CLIENT,
    "/baton.v1.Generation/GetLoad": Access.CLIENT,
    "/baton.v1.Generation/FlushCaches": Access.WATCHER,
    "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics": Access.CLIENT,
    "/baton.v1.Prefill/Serve": Access.ROUTER,
    "/baton.v1.Decode/Serve": Access.ROUTER,
    "/baton.v1.Worker/Watch": Access.WATCHER,
    "/baton.v1.Worker/FlushCache": Access.WATCHER,
    "/baton.v1.Pipeline/Join": Access.POOL,
}
# Services of other packages, whole but for methods with a row of their own.
SERVICES: Mapping[str, Access] = {
    "vllm.grpc.engine.VllmEngine": Access.CLIENT,
    "vllm.grpc.engine.VllmEngine/FlushCache": Access.WATCHER,
    # it shows tokens of everybody's prompts
    "vllm.grpc.engine.VllmEngine/SubscribeKvEvents": Access.WATCHER,
    "grpc.channelz.v1.Channelz": Access.WATCHER,
    "grpc.health.v1.Health": Access.OPEN,
    "grpc.reflection.v1alpha.ServerReflection": Access.OPEN,
    "grpc.reflection.v1.ServerReflection": Access.OPEN,
}
_WATCHERS = (PeerRole.ROUTER, PeerRole.OPERATOR)
_SPIFFE_ID = re.compile(r"spiffe://[a-z0-9._-]+/baton/([a-z]+)")


def access_to(method: str) -> Access:
    """`method` is a full path, "/baton.v1.Prefill/Serve". One that is in neither table is
    closed."""
    path = method.removeprefix("/")
    service = path.partition("/")[0]
    return METHODS.get(method) or SERVICES.get(path) or SERVICES.get(service, Access.NOBODY)


def certified(auth_context: Mapping[str, Iterable[bytes]]) -> Caller:
    """Whom a verified certificate names: by its DNS names and URIs, without any by its common
    name."""
    named = [*auth_context.get("peer_dns", ()), *auth_context.get("peer_uri", ())]
    names = sorted(
        {
            name.decode(errors="replace")
            for name in named or auth_context.get("x509_common_name", ())
        }
    )
    return Caller("certificate:" + "|".join(names), frozenset(names)) if names else ANYBODY


def network_of(address: str) -> bytes:
    """Return what stands for the peer at an address: all of an IPv4 address, the network of an IPv6
    one."""
    if ":" not in address:
        return socket.inet_pton(socket.AF_INET, address)
    packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0])
    is_mapped = packed.startswith(bytes(10) + b"\xff\xff")
    return packed[12:] if is_mapped else packed[:8]


def address_of(peer: str) -> str:
    """Return the address in what gRPC calls a peer, without its port: of IPv6 the network that it
    is of."""
    host = unquote(peer.partition(":")[2].rpartition(":")[0]).strip("[]")
    try:
        return network_of(host).hex()
    except OSError:
        return peer  # of a socket that has none


def roles_of(auth_context: Mapping[str, Iterable[bytes]]) -> frozenset[PeerRole]:
    """The roles a verified certificate gives, from the properties gRPC has read out of it."""
    named = [name.decode(errors="replace") for name in auth_context.get("peer_dns", ())]
    for uri in auth_context.get("peer_uri", ()):
        if found := _SPIFFE_ID.fullmatch(uri.decode(errors="replace")):
            named.append(found[1])
    return frozenset(role for role in PeerRole if role.value in named)


def check_role(method: str, roles: frozenset[PeerRole], *, pool: PeerRole | None) -> None:
    """`pool` is the role of the pool the server leads, if it does. Raises PermissionDeniedError."""
    rules: Mapping[Access, tuple[PeerRole, ...]] = {
        Access.ROUTER: (PeerRole.ROUTER,),
        Access.WATCHER: _WATCHERS,
        Access.POOL: () if pool is None else (pool,),
    }
    allowed = rules.get(access_to(method), ())
    if roles.isdisjoint(allowed):
        may = " or ".join(allowed) or "nobody"
        held = ", ".join(sorted(roles)) or "no role"
        raise PermissionDeniedError(
            f"{method} may be called by {may}; the caller's certificate names {held}"
        )


Context = grpc.aio.ServicerContext[Any, Any]


class ClientCertificates(StrEnum):
    """Whether a TLS server requires one."""

    REQUIRED = "required"
    NONE = "none"


class TlsConfig(Config):
    """Settings of every process that listens and calls others: all three files, or plain text."""

    health_listen: AddressField | None = Field(
        default=None,
        description="HOST:PORT that serves health alone, in plain text, for probes without TLS",
    )
    tls_cert: Path | None = Field(
        default=None, description="PEM certificate of this process; its DNS name is its role"
    )
    tls_key: Path | None = Field(default=None, description="PEM key of --tls-cert, not encrypted")
    tls_ca: Path | None = Field(
        default=None, description="PEM certificates of the authority of all roles"
    )

    def certificates(self) -> CertificateStore | None:
        """None without any of the files. Raises ConfigError when some are missing or cannot be
        used."""
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
    """`pool` is the role whose stages may join, `tokens` what clients of the public API must
    show."""

    certificates: CertificateStore | None = None
    client_certificates: ClientCertificates = ClientCertificates.REQUIRED
    tokens: TokenList | None = None
    pool: PeerRole | None = None

    @property
    def names_clients(self) -> bool:
        """Whether `caller` can distinguish clients."""
        has_names = (
            self.certificates is not None
            and self.client_certificates is ClientCertificates.REQUIRED
        )
        return has_names or self.tokens is not None

    @property
    def weakness(self) -> str:
        """What an operator of a server beyond loopback has to know; empty if nothing."""
        if not self.names_clients:
            return "open to everybody who can reach it: no certificates and no tokens are asked for"
        if self.certificates is None:
            return "asking for tokens in plain text: everybody on the way can read them"
        return ""

    def credentials(self) -> grpc.ServerCredentials | None:
        """None: plain text."""
        if self.certificates is None:
            return None
        required = self.client_certificates is ClientCertificates.REQUIRED
        return self.certificates.server_credentials(require_client_certificate=required)

    def check(self, method: str, context: Context) -> None:
        """Raises UnauthenticatedError or PermissionDeniedError for a caller who may not call
        `method`."""
        access = access_to(method)
        if access is Access.CLIENT:
            if self.tokens is not None:
                self.tokens.check(_authorization(context))
        elif access is not Access.OPEN and (
            self.certificates is not None or self.tokens is not None
        ):
            check_role(method, roles_of(context.auth_context()), pool=self.pool)

    def caller(self, context: Context) -> Caller:
        """Who calls a method for clients, after `check`: the holder of a token, else of a
        certificate, else whoever comes from that address."""
        roles = (
            frozenset[PeerRole]() if self.certificates is None else roles_of(context.auth_context())
        )
        is_operator = not roles.isdisjoint(_WATCHERS) or (
            self.certificates is None and self.tokens is None
        )
        if self.tokens is not None:
            name = self.tokens.check(_authorization(context))
            return Caller(f"token:{name}", frozenset({name}), is_operator=is_operator)
        shown = ANYBODY if self.certificates is None else certified(context.auth_context())
        if not shown.identity:
            shown = Caller(address=address_of(context.peer()))
        return replace(shown, is_operator=is_operator)


def _authorization(context: Context) -> str | None:
    authorization = dict(context.invocation_metadata() or ()).get(AUTHORIZATION_KEY)
    return authorization if isinstance(authorization, str) else None


@dataclass(frozen=True)
class ChannelSecurity:
    """What a caller shows, and which servers it accepts. `server_name` is the DNS name the server's
    certificate must have; empty: the host of the address."""

    certificates: CertificateStore | None = None
    token: OwnToken | None = None
    server_name: str = ""

    @property
    def is_plain(self) -> bool:
        return self.certificates is None and self.token is None

    def shown(self) -> object:
        """What servers see of it: the same object until the files change."""
        return None if self.certificates is None else self.certificates.current()

    def to(self, role: PeerRole) -> "ChannelSecurity":
        """For a channel to a server that must hold this role."""
        return replace(self, server_name=role.value)

    def check_target(self, address: str) -> None:
        """Raises ConfigError when the token would be readable on the network."""
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
    """What a client of the public API was given; `tls_ca` turns TLS on. Raises ConfigError naming
    the file that is missing or cannot be used."""
    if tls_ca is None and (tls_cert is not None or tls_key is not None):
        raise ConfigError("tls_ca is missing: it says which servers to trust", field="tls_ca")
    certificates = None if tls_ca is None else CertificateStore(TlsFiles(tls_ca, tls_cert, tls_key))
    return ChannelSecurity(
        certificates, None if token_file is None else OwnToken(token_file), server_name
    )


OPEN_SERVER = ServerSecurity()
PLAIN_CHANNEL = ChannelSecurity()
