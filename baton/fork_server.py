"""Start of child processes, independently or as forks of a process with the workers' imports
loaded.

    child = await spawn("router", arguments, core="all", environment=environment)

    with ForkServer() as fork_server:                     # a process; loads while it accepts the
    first orders
        async with await fork_server.connect() as link:
            child = await link.spawn("decode", arguments, core="1", environment=environment)
"""

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from runtime.clock import Deadline, LoopClock
from runtime.errors import ConfigError, PeerLostError, UnavailableError
from runtime.process.child_process import program
from runtime.process.spawn_protocol import (
    Order,
    OrderAnswer,
    open_socket,
    receive_answer,
    send_order,
)

LINE_LIMIT = 1 << 20
MAX_SOCKET_BYTES = 107  # of a path: unix(7)
_LISTEN_S = 30.0  # for a new interpreter, on a busy machine
_LOOK_S = 0.02
_REAP_S = 5.0


class Child(Protocol):
    """Running process and its output; an `asyncio.subprocess.Process` is one."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    @property
    def stdout(self) -> asyncio.StreamReader | None: ...

    async def wait(self) -> int: ...


class Spawn(Protocol):
    """Starter of `python -m MODULE ARG...`, tied to this process; raises UnavailableError on
    failure."""

    async def __call__(
        self, module: str, arguments: Sequence[str], *, core: str, environment: Mapping[str, str]
    ) -> Child: ...


class ProcessPlaces(Protocol):
    """Hosts and wrappers of the processes of a cluster."""

    def host(self, name: str) -> str:
        """Return the address on which the process listens and the others find it."""
        ...

    def program(
        self, name: str, module: str, arguments: Sequence[str]
    ) -> tuple[str, Sequence[str]]:
        """Return the module to run for this process, and its arguments."""
        ...


class Here:
    """All processes on this machine's loopback, without a wrapper."""

    def host(self, name: str) -> str:
        return "127.0.0.1"

    def program(
        self, name: str, module: str, arguments: Sequence[str]
    ) -> tuple[str, Sequence[str]]:
        return module, arguments


HERE = Here()


async def spawn(
    module: str, arguments: Sequence[str], *, core: str, environment: Mapping[str, str]
) -> Child:
    """Start a process in its own session; it ends with this process."""
    command = program("baton.child", str(os.getpid()), core, module, *arguments)
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=environment,
        start_new_session=True,
        limit=LINE_LIMIT,
    )


class ForkServer:
    """Process that forks workers.

    It belongs to no event loop, so that several clusters can use it in turn. Use it as a context
    manager, from a thread that outlives it.
    """

    def __init__(self) -> None:
        """Choose the path of the socket, or raise ConfigError if it cannot be created."""
        try:
            self._folder = tempfile.TemporaryDirectory(prefix="baton-fork-")
        except OSError as error:
            raise ConfigError(
                f"no folder for temporary files (TMPDIR): {error}", field="tmpdir"
            ) from error
        self._path = Path(self._folder.name) / "socket"
        if (size := len(os.fsencode(self._path))) > MAX_SOCKET_BYTES:
            self._folder.cleanup()
            raise ConfigError(
                f"the folder for temporary files (TMPDIR) is too deep for a socket: {self._path} has "
                f"{size} bytes, the limit is {MAX_SOCKET_BYTES}",
                field="tmpdir",
            )
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "THP_MEM_ALLOC_ENABLE": "1"}
        self._process = subprocess.Popen(
            program("pool.fork_server", str(os.getpid()), str(self._path)),
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process and its workers."""
        self._process.kill()
        self._process.wait(_REAP_S)
        self._folder.cleanup()

    async def connect(self) -> "ForkServerLink":
        """Connect, or raise UnavailableError if the process cannot be reached."""
        deadline = Deadline.after(LoopClock(), _LISTEN_S)
        channel = open_socket()
        while True:
            try:
                channel.connect(str(self._path))
            except OSError as error:
                if (code := self._process.poll()) is not None or deadline.is_over:
                    channel.close()
                    reason = error.strerror if code is None else f"it ended with exit code {code}"
                    raise UnavailableError(
                        f"cannot reach the process that forks workers: {reason}"
                    ) from error
                await asyncio.sleep(_LOOK_S)
            else:
                return ForkServerLink(channel)


class ForkedChild:
    """Child that is a fork of the fork server."""

    def __init__(self, stdout: asyncio.StreamReader) -> None:
        self._stdout = stdout
        self._pid: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int:
        return self._pid.result()

    @property
    def returncode(self) -> int | None:
        return self._code.result() if self._code.done() else None

    @property
    def stdout(self) -> asyncio.StreamReader | None:
        return self._stdout

    async def wait(self) -> int:
        return await asyncio.shield(self._code)

    async def started(self) -> None:
        """Wait for the start, or raise PeerLostError if the fork server ended first."""
        await asyncio.shield(self._pid)

    def answered(self, answer: OrderAnswer) -> None:
        if not self._pid.done():
            self._pid.set_result(answer.pid)
        if answer.code is not None:
            self._code.set_result(answer.code)

    def lost(self) -> None:
        """Record that the fork server has ended, and this process with it."""
        if not self._pid.done():
            self._pid.set_exception(PeerLostError("the fork server has ended"))
            self._pid.exception()  # mark as retrieved: its order may no longer be awaited
        if not self._code.done():
            self._code.set_result(-signal.SIGKILL)


class ForkServerLink:
    """Connection of one event loop; `is_open` until the fork server ends."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._numbers = itertools.count()
        self._children: dict[int, ForkedChild] = {}
        self._outputs: set[asyncio.ReadTransport] = set()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(channel, self._on_answer)
        self.is_open = True

    def close(self) -> None:
        """Close the connection. Workers continue, but their output is no longer read: end them
        first."""
        if self.is_open:
            self.is_open = False
            self._loop.remove_reader(self._channel)
            self._channel.close()
            for child in self._children.values():
                child.lost()
            self._children.clear()
            for output in self._outputs:
                output.close()

    async def spawn(
        self, module: str, arguments: Sequence[str], *, core: str, environment: Mapping[str, str]
    ) -> Child:
        """Start a process as a fork, or raise UnavailableError if the fork server cannot."""
        if not self.is_open:
            raise UnavailableError("the fork server has ended")
        order = Order(
            next(self._numbers), module, tuple(arguments), dict(environment), os.getcwd(), core
        )
        reader = asyncio.StreamReader(LINE_LIMIT)
        read_end, write_end = os.pipe()
        try:
            output, _ = await self._loop.connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", 0)
            )
            self._outputs = {other for other in self._outputs if not other.is_closing()} | {output}
            child = self._children[order.number] = ForkedChild(reader)
            send_order(self._channel, order, write_end)
        finally:
            os.close(write_end)
        try:
            await child.started()
        except PeerLostError:
            output.close()
            raise
        return child

    def _on_answer(self) -> None:
        try:
            answer = receive_answer(self._channel)
        except OSError:
            answer = None
        if answer is None:
            self.close()
            return
        child = self._children[answer.number]
        child.answered(answer)
        if answer.code is not None:
            del self._children[answer.number]
