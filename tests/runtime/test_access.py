"""The access table against the .proto files and a hand-written copy."""

import re
from pathlib import Path

import pytest

from runtime.errors import PermissionDeniedError
from runtime.security.access import (
    METHODS,
    SERVICES,
    Access,
    PeerRole,
    access_to,
    check_role,
    roles_of,
)

PROTOS = Path(__file__).resolve().parents[2] / "protos"
# Method -> roles that a server with certificates lets in; on a pool led by prefill, and on one led
# by decode.
ROLES: dict[str, tuple[set[PeerRole], set[PeerRole]]] = {
    "/baton.v1.Prefill/Serve": ({PeerRole.ROUTER}, {PeerRole.ROUTER}),
    "/baton.v1.Decode/Serve": ({PeerRole.ROUTER}, {PeerRole.ROUTER}),
    "/baton.v1.Worker/Watch": ({PeerRole.ROUTER, PeerRole.OPERATOR},) * 2,
    "/baton.v1.Worker/FlushCache": ({PeerRole.ROUTER, PeerRole.OPERATOR},) * 2,
    "/baton.v1.Worker/SetRoles": ({PeerRole.ROUTER, PeerRole.OPERATOR},) * 2,
    "/baton.v1.Adapters/LoadAdapter": ({PeerRole.ROUTER, PeerRole.OPERATOR},) * 2,
    "/baton.v1.Adapters/UnloadAdapter": ({PeerRole.ROUTER, PeerRole.OPERATOR},) * 2,
    "/baton.v1.Adapters/ListAdapters": ({PeerRole.ROUTER, PeerRole.OPERATOR},) * 2,
    "/baton.v1.Caches/ListCaches": ({PeerRole.ROUTER, PeerRole.OPERATOR},) * 2,
    "/baton.v1.Generation/FlushCaches": ({PeerRole.ROUTER, PeerRole.OPERATOR},) * 2,
    "/baton.v1.Pipeline/Join": ({PeerRole.PREFILL}, {PeerRole.DECODE}),
    "/baton.v1.Lending/Lend": ({PeerRole.PREFILL, PeerRole.DECODE},) * 2,
}


def declared_methods() -> set[str]:
    """Return the full names of every RPC of every .proto file."""
    found = set()
    for path in PROTOS.rglob("*.proto"):
        text = re.sub(r"//[^\n]*", "", path.read_text())
        (package,) = re.findall(r"^package\s+([\w.]+);", text, re.MULTILINE)
        for service, body in re.findall(r"service\s+(\w+)\s*\{(.*?)\n\}", text, re.DOTALL):
            found |= {
                f"/{package}.{service}/{name}" for name in re.findall(r"rpc\s+(\w+)\s*\(", body)
            }
    return found


def test_every_method_has_a_row_and_every_row_a_method() -> None:
    assert set(METHODS) == declared_methods()
    assert len(declared_methods()) >= 8


def test_only_public_services_are_for_clients() -> None:
    for method, access in METHODS.items():
        is_public = method.startswith(
            ("/baton.v1.Generation/", "/xds.service.orca.v3.OpenRcaService/")
        )
        assert (access is Access.CLIENT) == (
            is_public and method != "/baton.v1.Generation/FlushCaches"
        ), method
        assert access is Access.CLIENT or method in ROLES


@pytest.mark.parametrize("method", ROLES)
@pytest.mark.parametrize("role", PeerRole)
@pytest.mark.parametrize("pool", [PeerRole.PREFILL, PeerRole.DECODE])
def test_role_by_method(method: str, role: PeerRole, pool: PeerRole) -> None:
    if role in ROLES[method][pool is PeerRole.DECODE]:
        check_role(method, frozenset({role}), pool=pool)
        return
    with pytest.raises(PermissionDeniedError, match=f"{method} may be called by .* names {role}"):
        check_role(method, frozenset({role}), pool=pool)


def test_unlisted_methods_are_closed() -> None:
    for method in (
        "/baton.v1.Prefill/Stop",
        "/other.Service/Call",
        "/baton.v1.Generation",
        "",
        "/",
    ):
        assert access_to(method) is Access.NOBODY
        with pytest.raises(PermissionDeniedError, match="by no caller"):
            check_role(method, frozenset(PeerRole), pool=PeerRole.DECODE)
    with pytest.raises(PermissionDeniedError):
        check_role("/baton.v1.Pipeline/Join", frozenset(PeerRole), pool=None)


def test_the_page_on_security_has_every_row() -> None:
    page = (PROTOS.parent / "docs" / "security.md").read_text()
    table = [line for line in page.splitlines() if line.startswith("|")]
    rows = {name: row for row in table for name in re.findall(r"`([\w.]+/[\w*]+)`", row)}
    every = {method.removeprefix("/"): access for method, access in METHODS.items()}
    every |= {
        name if "/" in name else f"{name}/*": access
        for name, access in SERVICES.items()
        if access is not Access.OPEN
    }
    said = {
        Access.CLIENT: "clients",
        Access.ROUTER: "| `router` |",
        Access.WATCHER: "`router`, `operator`",
        Access.POOL: "`prefill` on a prefill pool, `decode` on a decode pool",
        Access.POOLS: "| `prefill`, `decode` |",
    }
    for name, access in every.items():
        row = rows.get(name) or rows.get(f"{name.partition('/')[0]}/*")
        assert row is not None, f"docs/security.md does not say who may call {name}"
        assert said[access] in row


def test_flushing_is_no_clients_business_in_any_service() -> None:
    assert access_to("/vllm.grpc.engine.VllmEngine/FlushCache") is Access.WATCHER
    assert access_to("/vllm.grpc.engine.VllmEngine/Generate") is Access.CLIENT


def test_health_and_reflection_are_open() -> None:
    assert access_to("/grpc.health.v1.Health/Watch") is Access.OPEN
    assert (
        access_to("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo") is Access.OPEN
    )


def test_roles_are_read_from_verified_names_only() -> None:
    assert roles_of({"peer_dns": [b"router", b"host-7"], "x509_common_name": [b"decode"]}) == {
        PeerRole.ROUTER
    }
    assert roles_of({"peer_uri": [b"spiffe://a.b/baton/decode"]}) == {PeerRole.DECODE}
    assert (
        roles_of({"peer_uri": [b"https://a.b/baton/decode", b"spiffe://a.b/baton/decode/"]})
        == frozenset()
    )
    assert (
        roles_of({"x509_subject_alternative_name": [b"router"], "peer_email": [b"router"]})
        == frozenset()
    )
    assert roles_of({}) == frozenset()
