"""`python -m pool.fork_server PARENT_PID SOCKET`: imports the modules of a worker once, then forks
a worker per order.

Importing torch, numba and UCX takes most of a worker's start. A local cluster does it once. Its
workers, and their replacements, start in a fraction of the time and share the memory. The imports
leave no thread and open no device or connection, so a fork is equivalent to a new process. Workers
die with this process, and this process dies with its parent.
"""

import gc
import logging
import os
import runpy
import selectors
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from threading import Thread
from typing import TypeVar

from runtime.errors import InternalError
from runtime.process.child_process import ALL_CORES, tie_to_parent
from runtime.process.quiet import quiet_grpc
from runtime.process.spawn_protocol import (
    Order,
    OrderAnswer,
    is_from_user,
    open_socket,
    receive_order,
    send_answer,
)

T = TypeVar("T")


def main() -> None:
    """Run until the parent ends this process; in a fork, until its worker has ended."""
    parent, path = sys.argv[1:]
    tie_to_parent(int(parent), ALL_CORES)
    with open_socket() as listener:
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen()
        try:
            load()
        except (ImportError, MemoryError, OSError) as error:
            sys.exit(f"the modules of a worker cannot be loaded: {error}")
        order = SpawnServer(listener).serve()
    become(order)


def load() -> None:
    """Import the modules that forks share.

    Raises:
        InternalError: an import left a thread running, which no fork would have.
    """
    quiet_grpc()
    gc.disable()  # modules stay alive, and searching for garbage would take a seventh of the time
    import engine.kernels.host.codegen.compiled  # imports torch and numba
    from pool.stage import transports

    # UCX measures a clock for 0.4 s while it loads, and the dynamic linker loads nothing else
    # meanwhile. So it loads in parallel with Python-only imports.
    ucx = Thread(target=transports.preload)
    ucx.start()
    import pool.start  # noqa: F401

    engine.kernels.host.codegen.compiled.load_numba()
    ucx.join()
    if (num_threads := len(os.listdir("/proc/self/task"))) > 1:
        raise InternalError(
            f"{num_threads - 1} threads were started by a worker's imports; forks would lack them"
        )
    gc.collect()
    gc.freeze()  # so that a garbage collection in a fork does not copy shared pages
    gc.enable()


@dataclass
class SpawnServer:
    """A server of spawn orders from any number of connections, one at a time."""

    listener: socket.socket
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _order: Order | None = None

    def serve(self) -> Order:
        """Serve orders; return only in a fork, with the order that it executes."""
        self._selector.register(self.listener, selectors.EVENT_READ, self._accept)
        while self._order is None:
            for key, _ in self._selector.select():
                key.data()
                if self._order is not None:
                    break
        self._selector.close()
        return self._order

    def _accept(self) -> None:
        channel, _ = self.listener.accept()
        if not is_from_user(channel, os.getuid()):
            channel.close()  # an order can run any module
            return
        self._selector.register(channel, selectors.EVENT_READ, partial(self._take, channel))

    def _take(self, channel: socket.socket) -> None:
        taken = _unless_gone(lambda: receive_order(channel))
        if taken is None:
            self._selector.unregister(channel)
            channel.close()
            return
        order, output = taken
        ready, is_ready = os.pipe()  # closed by the worker when signals to its group reach it
        parent = os.getpid()
        pid = os.fork()
        os.close(is_ready if pid else ready)
        if not pid:
            self._leave(order, parent, output)
            os.close(is_ready)
            self._order = order
            return
        os.close(output)
        os.read(ready, 1)
        os.close(ready)
        handle = os.pidfd_open(pid)
        self._selector.register(
            handle, selectors.EVENT_READ, partial(self._reap, channel, handle, order.number, pid)
        )
        _unless_gone(lambda: send_answer(channel, OrderAnswer(order.number, pid)))

    def _leave(self, order: Order, parent: int, output: int) -> None:
        """Set up the fork: a new session, tied to the fork server, without its files."""
        os.setsid()
        tie_to_parent(parent, order.core)
        for key in list(self._selector.get_map().values()):
            if key.fileobj is not self.listener:
                os.close(key.fd)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)

    def _reap(self, channel: socket.socket, handle: int, number: int, pid: int) -> None:
        self._selector.unregister(handle)
        os.close(handle)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        _unless_gone(lambda: send_answer(channel, OrderAnswer(number, pid, code)))


def _unless_gone(call: Callable[[], T]) -> T | None:
    """Return the result of `call`, or None if the supervisor has closed its end.

    Its workers keep running.
    """
    try:
        return call()
    except OSError:
        return None


def become(order: Order) -> None:
    """Run the worker's module as its own program would, and exit with its code.

    The exit is immediate: an orderly shutdown of the interpreter takes half a second, and copies
    most of the shared memory.
    """
    os.chdir(order.folder)
    os.environ.clear()
    os.environ.update(order.environment)
    sys.argv = [order.module, *order.arguments]
    try:
        runpy.run_module(order.module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if not isinstance(ended.code, int):
            raise
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended.code)


if __name__ == "__main__":
    main()
