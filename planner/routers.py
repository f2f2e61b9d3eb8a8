"""Clients of all routers. A name stands for each of its addresses, as that of a headless service."""

import asyncio
import logging
import socket
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

from baton.client import AsyncBatonClient
from runtime.config import Address, parse_address
from runtime.security.access import ChannelSecurity, PeerRole

RESOLVE_S = 5.0  # limit of one lookup, and the pause between two

logger = logging.getLogger(__name__)


class RouterClients:
    """Clients by address, which `refresh` keeps up to date."""

    def __init__(self, targets: Sequence[str], security: ChannelSecurity) -> None:
        """Create the clients of these targets, HOST:PORT; nothing is resolved yet.

        The certificate of a router must name its role, not one of its addresses.
        """
        self._targets = targets
        self._security = security.to(PeerRole.ROUTER)
        self._addresses: dict[str, frozenset[str]] = {}  # by target, as of its last lookup
        self._clients: dict[str, AsyncBatonClient] = {}
        self._looked_s = float("-inf")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._keep(())

    async def refresh(self, now_s: float) -> Mapping[str, AsyncBatonClient]:
        """Return a client for every address. Names are looked up at most every `RESOLVE_S`.

        A name that cannot be resolved keeps its addresses.
        """
        if now_s >= self._looked_s + RESOLVE_S:
            self._looked_s = now_s
            for target in self._targets:
                self._addresses[target] = await self._look_up(target)
                for address in self._addresses[target] - self._clients.keys():
                    self._clients[address] = AsyncBatonClient(address, security=self._security)
            await self._keep(frozenset().union(*self._addresses.values()))
        return dict(self._clients)

    async def _look_up(self, target: str) -> frozenset[str]:
        address = parse_address(target)
        if not address.is_name:
            return frozenset((target,))
        known = self._addresses.get(target, frozenset())
        try:
            async with asyncio.timeout(RESOLVE_S):
                found = await asyncio.get_running_loop().getaddrinfo(
                    address.host, address.port, type=socket.SOCK_STREAM
                )
        except (OSError, TimeoutError) as error:
            reason = str(error) or f"no answer in {RESOLVE_S:g} s"
            logger.warning("cannot resolve a router", extra={"router": target, "reason": reason})
            return known
        return frozenset(str(Address(str(info[4][0]), address.port)) for info in found)

    async def _keep(self, addresses: Iterable[str]) -> None:
        """Close the clients of other addresses."""
        for address in self._clients.keys() - set(addresses):
            await self._clients.pop(address).close()
