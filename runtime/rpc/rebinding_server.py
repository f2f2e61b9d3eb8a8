"""A gRPC server that outlives what grpc.aio does not: a request whose path is not UTF-8, from any
caller, ends the loop in which grpc.aio takes calls, and with it the port (grpcio 1.85). Calls under
way go on; nothing takes new ones.

`LastingServer` is a `grpc.aio.Server` that sees it and takes the port again with a server of the
same handlers.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import grpc

from runtime.rpc.connections import ConnectionWatch

logger = logging.getLogger(__name__)

LOOK_S = 0.25  # an idle process wakes this often for it
REBIND_S = 10.0


class LastingServer(grpc.aio.Server):
    """Build inside a running event loop. `make` makes a server without handlers or ports; `watch`
    bounds the connections to its ports while it serves."""

    def __init__(self, make: Callable[[], grpc.aio.Server], watch: ConnectionWatch) -> None:
        self._make = make
        self._connections = watch
        self._server = make()
        self._former: dict[
            grpc.aio.Server, asyncio.Task[None]
        ] = {}  # broken, until the calls there have ended
        self._additions: list[Callable[[grpc.aio.Server], object]] = []
        self._ports: dict[
            str, Callable[[grpc.aio.Server], int]
        ] = {}  # by address, how to take it again
        self._watch: asyncio.Task[None] | None = None

    def add_generic_rpc_handlers(
        self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler]
    ) -> None:
        handlers = tuple(generic_rpc_handlers)
        self._add(lambda server: server.add_generic_rpc_handlers(handlers))

    def add_registered_method_handlers(self, service_name: str, method_handlers: Any) -> None:  # noqa: ANN401
        """Called by generated code."""
        self._add(
            lambda server: server.add_registered_method_handlers(service_name, method_handlers)
        )

    def add_insecure_port(self, address: str) -> int:
        port = self._server.add_insecure_port(address)
        self._opened(address, port, lambda server, taken: server.add_insecure_port(taken))
        return port

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int:
        port = self._server.add_secure_port(address, server_credentials)
        self._opened(
            address, port, lambda server, taken: server.add_secure_port(taken, server_credentials)
        )
        return port

    @property
    def num_former(self) -> int:
        """Servers that were replaced and have calls under way."""
        return len(self._former)

    async def start(self) -> None:
        await self._server.start()
        self._connections.start(int(address.rpartition(":")[2]) for address in self._ports)
        self._watch = asyncio.create_task(self._look())

    async def stop(self, grace: float | None) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        self._connections.stop()
        former = tuple(self._former)
        await asyncio.gather(self._server.stop(grace), *(server.stop(grace) for server in former))
        await asyncio.gather(*self._former.values(), return_exceptions=True)

    async def wait_for_termination(self, timeout: float | None = None) -> bool:  # noqa: ASYNC109 (grpc.aio's)
        return await self._server.wait_for_termination(timeout)

    def _add(self, addition: Callable[[grpc.aio.Server], object]) -> None:
        self._additions.append(addition)
        addition(self._server)

    def _opened(
        self, address: str, port: int, open_again: Callable[[grpc.aio.Server, str], int]
    ) -> None:
        taken = f"{address.rpartition(':')[0]}:{port}"  # the one that was given for port 0
        self._ports[taken] = lambda server: open_again(server, taken)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if not _takes_calls(self._server):
                await self._replace()

    async def _replace(self) -> None:
        logger.error(
            "gRPC gave up its port because of a request it could not read; it is taken again",
            extra={"ports": ", ".join(self._ports)},
        )
        self._former[self._server] = asyncio.create_task(self._outlasted(self._server))
        deadline = asyncio.get_running_loop().time() + REBIND_S
        while not await self._taken_again():
            if asyncio.get_running_loop().time() > deadline:
                logger.error(
                    "the port could not be taken again yet", extra={"ports": ", ".join(self._ports)}
                )
                deadline += REBIND_S
            await asyncio.sleep(LOOK_S)

    async def _outlasted(self, server: grpc.aio.Server) -> None:
        """Free a former server when its last call has ended."""
        with suppress(Exception):  # what broke it
            await server.wait_for_termination()
        await server.stop(None)
        del self._former[server]

    async def _taken_again(self) -> bool:
        server = self._make()
        for addition in self._additions:
            addition(server)
        with suppress(RuntimeError):  # the former one has not let go of it yet
            if all(open_port(server) for open_port in self._ports.values()):
                await server.start()
                self._server = server
                return True
        return False


def _takes_calls(server: grpc.aio.Server) -> bool:
    """gRPC reports it nowhere else: `wait_for_termination` waits for the calls under way."""
    running: bool = server._server.is_running()  # type: ignore[attr-defined]  # noqa: SLF001
    return running
