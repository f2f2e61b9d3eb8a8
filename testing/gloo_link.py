"""Links over gloo between processes on CPUs, to test links without a device."""

import queue
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from datetime import timedelta

import torch
from torch import Tensor

from engine.pipeline.c10d import PointToPoint, Store, Work, gloo_group
from engine.pipeline.links import MESSAGE_TIMEOUT_S, OPEN_TIMEOUT_S, P2PLink, Transfer

_MAX_QUEUED = 64


class GlooBackend:
    """A gloo implementation of `engine.pipeline.links.LinkBackend`.

    Every process counts as a device.
    """

    name = "gloo"

    def __init__(self, host: str) -> None:
        """Create the backend; `host` is this machine's address for the other stages."""
        self.device = torch.device("cpu")
        self.device_id = secrets.token_hex(8)
        self._host = host

    def open(self, store: Store, end: int) -> P2PLink:
        return GlooLink(gloo_group(store, end, 2, host=self._host, timeout_s=OPEN_TIMEOUT_S), end)


class GlooLink:
    """A gloo implementation of `engine.pipeline.links.P2PLink`.

    gloo reports completed messages only to a waiting thread, so each link has one.
    """

    def __init__(self, group: PointToPoint, end: int) -> None:
        self._group = group
        self._peer = 1 - end
        self._jobs: queue.Queue[tuple[Future[bool], Work, Tensor] | None] = queue.Queue(_MAX_QUEUED)
        self._aborted = threading.Event()
        threading.Thread(target=self._run, name="gloo link", daemon=True).start()

    def send(self, flat: Tensor) -> Transfer:
        return self._launch(self._group.send, flat)

    def receive(self, num_bytes: int) -> tuple[Tensor, Transfer]:
        flat = torch.empty(num_bytes, dtype=torch.uint8)
        return flat, self._launch(self._group.recv, flat)

    def abort(self) -> None:
        self._aborted.set()
        with suppress(queue.Full):
            self._jobs.put_nowait(None)

    def _launch(
        self, operation: Callable[[list[Tensor], int, int], Work], flat: Tensor
    ) -> Transfer:
        done: Future[bool] = Future()
        self._jobs.put_nowait((done, operation([flat], self._peer, 0), flat))
        return _GlooTransfer(done, self._aborted)

    def _run(self) -> None:
        while not self._aborted.is_set() and (job := self._jobs.get()) is not None:
            done, work, _ = job
            try:
                work.wait(timedelta(seconds=MESSAGE_TIMEOUT_S))
                done.set_result(True)
            except RuntimeError as error:
                done.set_exception(error)


class _GlooTransfer:
    def __init__(self, done: "Future[bool]", aborted: threading.Event) -> None:
        self._done = done
        self._aborted = aborted

    def wait(self, timeout_s: float) -> bool:
        wait_for([self._done], timeout_s)
        if self._aborted.is_set():
            raise RuntimeError("the link was aborted")
        return self._done.done() and self._done.result()
