"""Tensors from one stage to the next, beside their frames: point-to-point messages of
`torch.distributed`.

A link is one direction between two neighbours, with a process group of its own: a lost neighbour
costs the links to it and no other, and nothing is shared with other users of torch.distributed in
this process. A message is received only when its frame has given its length, so nothing ever waits
on a device for a neighbour that sends nothing.

Opening a link needs both ends and cannot be cancelled, so it runs in a thread that nothing waits
for longer than a deadline.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from engine.pipeline.c10d import Store
from engine.pipeline.rendezvous import Rendezvous

OPEN_TIMEOUT_S = (
    45.0  # both ends begin at nearly the same time; NCCL takes seconds to find its devices
)
MESSAGE_TIMEOUT_S = 30.0


class Transfer(Protocol):
    """One message under way. Its memory is in use until it is done."""

    def wait(self, timeout_s: float) -> bool:
        """Whether it is done, after at most `timeout_s`. Raises RuntimeError when it never will
        be."""
        ...


class P2PLink(Protocol):
    """One end of an open link. Belongs to one thread, but for `abort`."""

    def send(self, flat: Tensor) -> Transfer:
        """`flat` [n] uint8 on the link's device, complete when what was launched so far is done."""
        ...

    def receive(self, num_bytes: int) -> tuple[Tensor, Transfer]:
        """The next message [num_bytes] uint8, to be read when it is done."""
        ...

    def abort(self) -> None:
        """End every transfer, done or not."""
        ...


class LinkBackend(Protocol):
    """How links are made on this stage's device. `device_id` is the same for two stages on one
    device only."""

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def device_id(self) -> str: ...

    def open(self, store: Store, end: int) -> P2PLink:
        """Meet the other end in `store`; `end` is 0 for the sender, 1 for the receiver. Blocks
        until both are there. Raises RuntimeError when they do not meet."""
        ...


class PendingLink:
    """A link that is being opened, or is open."""

    def __init__(self, open_link: Callable[[], P2PLink]) -> None:
        self._opened: Future[P2PLink] = Future()
        threading.Thread(target=self._run, args=(open_link,), name="link", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Whether it is open, after at most `timeout_s`. Raises RuntimeError when it cannot be
        opened."""
        wait_for([self._opened], timeout_s)
        return self._opened.done() and self._opened.result() is not None

    @property
    def link(self) -> P2PLink:
        """To be asked for once it is open."""
        return self._opened.result(0)

    def abort(self) -> None:
        """End its transfers; a link that opens later ends at once."""
        self._opened.add_done_callback(_abort_opened)

    def _run(self, open_link: Callable[[], P2PLink]) -> None:
        try:
            link = open_link()
        except RuntimeError as error:
            self._opened.set_exception(error)
        else:
            self._opened.set_result(link)


def _abort_opened(opened: Future[P2PLink]) -> None:
    with suppress(RuntimeError):
        opened.result().abort()


class P2PLinks:
    """The links of one stage in one forming of its pool: from the stage before it, and to the next
    one."""

    def __init__(
        self, backend: LinkBackend, place: Rendezvous, *, room: str, rank: int, size: int
    ) -> None:
        """`room`: the name of the forming at the rendezvous, which only its members know."""
        self.device = backend.device
        self._to = {rank + 1: _pending(backend, place, room, rank, 0)} if rank + 1 < size else {}
        self._from = {rank - 1: _pending(backend, place, room, rank - 1, 1)} if rank > 0 else {}

    def to(self, rank: int) -> PendingLink | None:
        """The link to that stage; None when it is not the next one."""
        return self._to.get(rank)

    def coming_from(self, rank: int) -> PendingLink | None:
        return self._from.get(rank)

    def abort(self) -> None:
        """End every transfer on both. They are not to be used afterwards."""
        for pending in (*self._to.values(), *self._from.values()):
            pending.abort()


def _pending(
    backend: LinkBackend, place: Rendezvous, room: str, sender: int, end: int
) -> PendingLink:
    return PendingLink(lambda: backend.open(place.enter(f"{room}/{sender}", OPEN_TIMEOUT_S), end))
