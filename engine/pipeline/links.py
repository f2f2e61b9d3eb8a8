"""Links for tensors between neighboring stages: point-to-point messages of `torch.distributed`.

A link is one direction between two neighbors, with its own process group. So a lost neighbor
breaks only the links to it, and other users of torch.distributed in this process are not affected.
A message is received only after its frame has given its length, so a device never waits for a
neighbor that sends nothing.

Opening a link needs both ends and cannot be cancelled. It runs in its own thread, and each
wait for that thread has a deadline.
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

# Both ends begin at nearly the same time. NCCL takes seconds to find its devices.
OPEN_TIMEOUT_S = 45.0
MESSAGE_TIMEOUT_S = 30.0


class Transfer(Protocol):
    """One message in transfer. Its memory is in use until it is done."""

    def wait(self, timeout_s: float) -> bool:
        """Return whether the transfer is done, after at most `timeout_s`.

        Raises:
            RuntimeError: it failed and never completes.
        """
        ...


class P2PLink(Protocol):
    """One end of an open link. It belongs to one thread; any thread may call `abort`."""

    def send(self, flat: Tensor) -> Transfer:
        """Send `flat`, [n] uint8 on the link's device, after the work that was launched so far."""
        ...

    def receive(self, num_bytes: int) -> tuple[Tensor, Transfer]:
        """Return the next message, [num_bytes] uint8. It may be read when the transfer is done."""
        ...

    def abort(self) -> None:
        """End every transfer, done or not."""
        ...


class LinkBackend(Protocol):
    """A maker of links for this stage's device.

    `device_id` is equal for two stages only if they share one device.
    """

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def device_id(self) -> str: ...

    def open(self, store: Store, end: int) -> P2PLink:
        """Meet the other end in `store`, and block until both are there.

        `end` is 0 for the sender and 1 for the receiver.

        Raises:
            RuntimeError: the two ends do not meet.
        """
        ...


class PendingLink:
    """A link that is open or is being opened."""

    def __init__(self, open_link: Callable[[], P2PLink]) -> None:
        self._opened: Future[P2PLink] = Future()
        threading.Thread(target=self._run, args=(open_link,), name="link", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Return whether the link is open, after at most `timeout_s`.

        Raises:
            RuntimeError: it cannot be opened.
        """
        wait_for([self._opened], timeout_s)
        return self._opened.done() and self._opened.result() is not None

    @property
    def link(self) -> P2PLink:
        """Return the link, which must be open."""
        return self._opened.result(0)

    def abort(self) -> None:
        """End the link's transfers. A link that opens later ends at once."""
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
    """The links of one stage in one forming of its pool.

    They lead from the previous stage and to the next one.
    """

    def __init__(
        self, backend: LinkBackend, place: Rendezvous, *, room: str, rank: int, size: int
    ) -> None:
        """Begin to open the links.

        `room` names the forming at the rendezvous; only members of the forming know it.
        """
        self.device = backend.device
        self._to = {rank + 1: _pending(backend, place, room, rank, 0)} if rank + 1 < size else {}
        self._from = {rank - 1: _pending(backend, place, room, rank - 1, 1)} if rank > 0 else {}

    def to(self, rank: int) -> PendingLink | None:
        """Return the link to `rank`, or None if it is not the next stage."""
        return self._to.get(rank)

    def coming_from(self, rank: int) -> PendingLink | None:
        return self._from.get(rank)

    def abort(self) -> None:
        """End every transfer on both links. They must not be used afterwards."""
        for pending in (*self._to.values(), *self._from.values()):
            pending.abort()


def _pending(
    backend: LinkBackend, place: Rendezvous, room: str, sender: int, end: int
) -> PendingLink:
    return PendingLink(lambda: backend.open(place.enter(f"{room}/{sender}", OPEN_TIMEOUT_S), end))
