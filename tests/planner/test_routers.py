"""Clients of routers: names with several addresses, addresses that come and go, failed lookups."""

import asyncio
import socket
from typing import Any

import pytest

from planner.routers import RESOLVE_S, RouterClients
from runtime.security.access import PLAIN_CHANNEL

TARGET = "routers.baton:7000"


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Return the addresses of names, as the loop's resolver finds them; an empty list is a failure."""
    known: dict[str, list[str]] = {}

    async def getaddrinfo(_: object, host: str, port: int, **__: object) -> list[tuple[Any, ...]]:
        if not known[host]:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in known[host]]

    monkeypatch.setattr(asyncio.base_events.BaseEventLoop, "getaddrinfo", getaddrinfo)
    return known


async def test_a_name_stands_for_its_addresses(names: dict[str, list[str]]) -> None:
    names["routers.baton"] = ["10.0.0.1", "10.0.0.2"]
    async with RouterClients((TARGET, "10.0.0.9:7000"), PLAIN_CHANNEL) as routers:
        found = await routers.refresh(0.0)
        assert set(found) == {"10.0.0.1:7000", "10.0.0.2:7000", "10.0.0.9:7000"}
        names["routers.baton"] = ["10.0.0.2", "10.0.0.3"]
        assert await routers.refresh(RESOLVE_S / 2) == found
        later = await routers.refresh(RESOLVE_S)
        assert set(later) == {"10.0.0.2:7000", "10.0.0.3:7000", "10.0.0.9:7000"}
        assert later["10.0.0.2:7000"] is found["10.0.0.2:7000"]
    assert await routers.refresh(RESOLVE_S) == {}


async def test_a_failed_lookup_keeps_addresses(names: dict[str, list[str]]) -> None:
    names["routers.baton"] = ["10.0.0.1"]
    async with RouterClients((TARGET,), PLAIN_CHANNEL) as routers:
        found = await routers.refresh(0.0)
        names["routers.baton"] = []
        assert await routers.refresh(RESOLVE_S) == found
