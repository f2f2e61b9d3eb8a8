"""Who may call which method: one table for all servers.

A caller's roles are what its certificate says: a DNS name that is a role (`router`) or a URI `spiffe://DOMAIN/baton/ROLE`.
Without certificates nobody has a name, and the network has to decide (docs/security.md).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from runtime.errors import PermissionDeniedError


class PeerRole(StrEnum):
    """What a certificate can name its holder."""

    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"
    OPERATOR = "operator"  # a person who looks at workers


class Access(StrEnum):
    """Who is let in."""

    OPEN = "open"  # everybody who can connect, without a token
    CLIENT = "client"  # everybody whom the server's token list, if it has one, lets in
    ROUTER = "router"
    WATCHER = "watcher"  # routers and operators
    POOL = "pool"  # stages of the server's own pool
    NOBODY = "nobody"


@dataclass(frozen=True)
class Caller:
    """A client, by what it has shown. `identity` keeps apart what belongs to different ones; all that have shown
    nothing share the empty one. `names` are for settings."""

    identity: str = ""
    names: frozenset[str] = frozenset()


ANYBODY = Caller()

METHODS: Mapping[str, Access] = {
    "/baton.v1.Generation/Generate": Access.CLIENT,
    "/baton.v1.Generation/Abort": Access.CLIENT,
    "/baton.v1.Generation/GetModelInfo": Access.CLIENT,
    "/baton.v1.Generation/GetClusterStatus": Access.CLIENT,
    "/baton.v1.Generation/GetLoad": Access.CLIENT,
    "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics": Access.CLIENT,
    "/baton.v1.Prefill/Run": Access.ROUTER,
    "/baton.v1.Decode/Generate": Access.ROUTER,
    "/baton.v1.Worker/Watch": Access.WATCHER,
    "/baton.v1.Pipeline/Join": Access.POOL,
}
# Services of other packages, whole.
SERVICES: Mapping[str, Access] = {
    "vllm.grpc.engine.VllmEngine": Access.CLIENT,
    "grpc.channelz.v1.Channelz": Access.WATCHER,
    "grpc.health.v1.Health": Access.OPEN,
    "grpc.reflection.v1alpha.ServerReflection": Access.OPEN,
    "grpc.reflection.v1.ServerReflection": Access.OPEN,
}
_SPIFFE_ID = re.compile(r"spiffe://[a-z0-9._-]+/baton/([a-z]+)")


def access_to(method: str) -> Access:
    """`method` is a full path, "/baton.v1.Prefill/Run". One that nobody has thought of is closed."""
    service = method.removeprefix("/").partition("/")[0]
    return METHODS.get(method) or SERVICES.get(service, Access.NOBODY)


def certified(auth_context: Mapping[str, Iterable[bytes]]) -> Caller:
    """Whom a verified certificate names: by its DNS names and URIs, without any by its common name."""
    named = [*auth_context.get("peer_dns", ()), *auth_context.get("peer_uri", ())]
    names = sorted({name.decode(errors="replace") for name in named or auth_context.get("x509_common_name", ())})
    return Caller("certificate:" + "|".join(names), frozenset(names)) if names else ANYBODY


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
        Access.WATCHER: (PeerRole.ROUTER, PeerRole.OPERATOR),
        Access.POOL: () if pool is None else (pool,),
    }
    allowed = rules.get(access_to(method), ())
    if roles.isdisjoint(allowed):
        may = " or ".join(allowed) or "nobody"
        held = ", ".join(sorted(roles)) or "no role"
        raise PermissionDeniedError(f"{method} may be called by {may}; the caller's certificate names {held}")
