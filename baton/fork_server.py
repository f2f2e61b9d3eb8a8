"""How a supervisor starts processes: each for itself, or as forks of a process that has loaded what
workers load.

child = await spawn("router", arguments, core="all", environment=environment)

with ForkServer() as fork_server:                               # a process; loads while it takes the first orders
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
    """A running process and what it writes. An `asyncio.subprocess.Process` is one."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    @property
    def stdout(self) -> asyncio.StreamReader | None: ...

    async def wait(self) -> int: ...


class Spawn(Protocol):
    """Starts `python -m MODULE ARG...`, tied to this process. Raises UnavailableError where it
    cannot."""

    async def __call__(
        self, module: str, arguments: Sequence[str], *, core: str, environment: Mapping[str, str]
    ) -> Child: ...


class ProcessPlaces(Protocol):
    """Where each process of a cluster runs, and within what."""

    def host(self, name: str) -> str:
        """The address it listens on, and the others find it at."""
        ...

    def program(
        self, name: str, module: str, arguments: Sequence[str]
    ) -> tuple[str, Sequence[str]]:
        """The module to run for this one, and its arguments."""
        ...


class Here:
    """All on this machine's loopback, as they are. Satisfies `ProcessPlaces`."""

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
    """A process of its own, in a session of its own, that ends with this one."""
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
    """The process itself; it belongs to no event loop, so that several clusters can have one after
    the other. Use as a context manager, from a thread that lives as long as it."""

    def __init__(self) -> None:
        """Raises ConfigError where its socket cannot be."""
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
        """Ends its workers, too."""
        self._process.kill()
        self._process.wait(_REAP_S)
        self._folder.cleanup()

    async def connect(self) -> "ForkServerLink":
        """Raises UnavailableError when there is nothing to connect to."""
        deadline = asyncio.get_running_loop().time() + _LISTEN_S
        channel = open_socket()
        while True:
            try:
                channel.connect(str(self._path))
            except OSError as error:
                if (
                    code := self._process.poll()
                ) is not None or asyncio.get_running_loop().time() > deadline:
                    channel.close()
                    reason = error.strerror if code is None else f"it ended with exit code {code}"
                    raise UnavailableError(
                        f"the process that loads what workers load cannot be reached: {reason}"
                    ) from error
                await asyncio.sleep(_LOOK_S)
            else:
                return ForkServerLink(channel)


class ForkedChild:
    """Satisfies `Child`."""

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
        """Raises PeerLostError when the fork server ended instead."""
        await asyncio.shield(self._pid)

    def answered(self, answer: OrderAnswer) -> None:
        if not self._pid.done():
            self._pid.set_result(answer.pid)
        if answer.code is not None:
            self._code.set_result(answer.code)

    def lost(self) -> None:
        """The fork server is gone, and so is this process."""
        if not self._pid.done():
            self._pid.set_exception(PeerLostError("the fork server has ended"))
            self._pid.exception()  # its order may not be waited for any more
        if not self._code.done():
            self._code.set_result(-signal.SIGKILL)


class ForkServerLink:
    """Orders of one event loop. `is_open` until the fork server ends."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._numbers = itertools.count()
        self._children: dict[int, ForkedChild] = {}
        self._outputs: set[asyncio.ReadTransport] = set()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(channel, self._on_answer)
        self.is_open = True

    def close(self) -> None:
        """Its workers go on, but what they write is not read any more: end them first."""
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
        """As the function of this name, but a fork. Raises UnavailableError when the fork server
        cannot."""
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
