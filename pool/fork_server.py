"""`python -m pool.fork_server PARENT_PID SOCKET`: loads what every worker loads, then forks a worker
for each order.

Loading torch, numba and UCX is most of a worker's start. A local cluster does it once; its workers,
and those that replace dead ones, are there in a fraction of the time, and share the memory. What is
loaded here leaves no thread and opens no device and no connection, so a fork of this process is as
good as a new one. Workers die with this process, and this one with its parent.
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
from transfer.ucx.api import load_ucx

T = TypeVar("T")


def main() -> None:
    """Until the parent ends this process; in a fork, until its worker has ended."""
    parent, path = sys.argv[1:]
    tie_to_parent(int(parent), ALL_CORES)
    with open_socket() as listener:
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen()
        try:
            load()
        except (ImportError, MemoryError, OSError) as error:
            sys.exit(f"what workers load cannot be loaded: {error}")
        order = SpawnServer(listener).serve()
    become(order)


def load() -> None:
    """What forks find in place. Raises InternalError if a thread is left: no fork would have it."""
    quiet_grpc()
    gc.disable()  # modules stay: a seventh of the time would go into looking for what does not
    import engine.kernels.host.codegen.compiled  # torch and numba

    # UCX measures a clock for 0.4 s as it loads, and the dynamic linker loads nothing else
    # meanwhile: so beside what is Python alone.
    ucx = Thread(target=load_ucx)
    ucx.start()
    import pool.start  # noqa: F401

    engine.kernels.host.codegen.compiled.load_numba()
    ucx.join()
    if (num_threads := len(os.listdir("/proc/self/task"))) > 1:
        raise InternalError(
            f"{num_threads - 1} threads have been started by what workers load; forks would lack them"
        )
    gc.collect()
    gc.freeze()  # so that a collection in a fork leaves the shared pages alone
    gc.enable()


@dataclass
class SpawnServer:
    """Takes orders from any number of connections, one after the other."""

    listener: socket.socket
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _order: Order | None = None

    def serve(self) -> Order:
        """Returns in a fork only, with what that is to be."""
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
            channel.close()  # an order runs any module
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
        parent, pid = os.getpid(), os.fork()
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
        """In the fork: a session of its own, tied to the fork server, and nothing of the fork server's but
        its modules."""
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
    """None when the supervisor has closed its end. What runs for it goes on."""
    try:
        return call()
    except OSError:
        return None


def become(order: Order) -> None:
    """Run the worker's module as its own program would. Where that ends with a code, so does the
    process, at once: to take apart all that was loaded takes the interpreter half a second, and
    most of the shared memory is copied."""
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
