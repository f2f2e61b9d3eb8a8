"""A gRPC server that reopens its port after grpc.aio has lost it.

In grpcio 1.85 a request whose path is not UTF-8, from any caller, ends the loop in which grpc.aio
accepts calls. Open calls continue, but no new one is accepted.

`LastingServer` is a `grpc.aio.Server` that detects this and reopens the port with a new server of
the same handlers.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import grpc

from runtime.clock import Deadline, LoopClock
from runtime.rpc.connections import ConnectionWatch

logger = logging.getLogger(__name__)

LOOK_S = 0.25  # wake-up interval of an idle process
REBIND_S = 10.0


class LastingServer(grpc.aio.Server):
    """Server that replaces its inner server when it breaks. Build it inside a running event loop.

    `make` makes a server without handlers or ports. `watch` limits the connections to its ports
    while it serves.
    """

    def __init__(self, make: Callable[[], grpc.aio.Server], watch: ConnectionWatch) -> None:
        self._make = make
        self._connections = watch
        self._server = make()
        # Broken servers, each with the task that stops it after its calls have ended.
        self._former: dict[grpc.aio.Server, asyncio.Task[None]] = {}
        self._additions: list[Callable[[grpc.aio.Server], object]] = []
        # By address: the function that opens it on another server.
        self._ports: dict[str, Callable[[grpc.aio.Server], int]] = {}
        self._watch: asyncio.Task[None] | None = None

    def add_generic_rpc_handlers(
        self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler]
    ) -> None:
        handlers = tuple(generic_rpc_handlers)
        self._add(lambda server: server.add_generic_rpc_handlers(handlers))

    def add_registered_method_handlers(self, service_name: str, method_handlers: Any) -> None:  # noqa: ANN401
        """Add the handlers of one service; generated code calls this."""
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
        """Return the number of replaced servers with open calls."""
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
        taken = f"{address.rpartition(':')[0]}:{port}"  # replaces port 0 by the chosen one
        self._ports[taken] = lambda server: open_again(server, taken)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if not _takes_calls(self._server):
                await self._replace()

    async def _replace(self) -> None:
        logger.error(
            "gRPC closed its port because of a request it could not read; reopening it",
            extra={"ports": ", ".join(self._ports)},
        )
        self._former[self._server] = asyncio.create_task(self._outlasted(self._server))
        clock = LoopClock()
        deadline = Deadline.after(clock, REBIND_S)
        while not await self._taken_again():
            if deadline.is_over:
                logger.error(
                    "the port could not be reopened yet", extra={"ports": ", ".join(self._ports)}
                )
                deadline = Deadline.after(clock, REBIND_S)
            await asyncio.sleep(LOOK_S)

    async def _outlasted(self, server: grpc.aio.Server) -> None:
        """Stop a former server when its last call has ended."""
        with suppress(Exception):  # the error that broke it
            await server.wait_for_termination()
        await server.stop(None)
        del self._former[server]

    async def _taken_again(self) -> bool:
        server = self._make()
        for addition in self._additions:
            addition(server)
        with suppress(RuntimeError):  # the former server has not released it yet
            if all(open_port(server) for open_port in self._ports.values()):
                await server.start()
                self._server = server
                return True
        return False


def _takes_calls(server: grpc.aio.Server) -> bool:
    """Return whether the server accepts calls.

    gRPC's public interface does not report it: `wait_for_termination` waits for the open calls.
    """
    running: bool = server._server.is_running()  # type: ignore[attr-defined]  # noqa: SLF001
    return running
