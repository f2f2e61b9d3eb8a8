"""What the schedulers of both roles know about a request, whatever they do with it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from engine.core.request import Request
from engine.memory.leases import PageAllocator, PageLease, SlotAllocator, SlotLease
from runtime.errors import BatonError, CapacityError

EventT = TypeVar("EventT")


@dataclass(frozen=True)
class Failed:
    """The engine runs the request no more; its owner releases it."""

    error: BatonError


@dataclass
class Entry(Generic[EventT]):
    """One request of a scheduler, from `submit` to `release`. Belongs to the engine thread."""

    key: int
    request: Request
    emit: Callable[[EventT], object]
    pages: PageLease | None = None  # None while it waits
    slot: SlotLease | None = None
    in_flight: int = 0  # batches it takes part in
    ends_at_s: float = math.inf  # its deadline, in the clock's seconds
    released: bool = False
    _computed: int = field(default=0, init=False)

    @property
    def owner(self) -> str:
        """In the ledgers of pages and slots."""
        return f"request {self.key}"

    @property
    def computed(self) -> int:
        """Tokens of the request whose cache entries exist or are in flight: batches keep their order, so what was
        launched is there for whatever is launched later. Nodes of a tree do not count."""
        return self._computed

    def advance(self, end: int) -> None:
        """The request's first `end` tokens count as computed. The only writer of `computed`."""
        self._computed = end

    def lease(self, pages: PageAllocator, slots: SlotAllocator, num_pages: int, *, shared: Sequence[int] = ()) -> None:
        """Take a slot and pages, `num_pages` in all, of which the `shared` first ones are in a cache. Raises
        CapacityError, and then holds neither."""
        try:
            self.pages = pages.alloc(0, owner=self.owner, shared=shared)  # first, lest they be evicted for the others
            self.slot = slots.alloc(owner=self.owner)
            self.pages.extend(num_pages - len(shared))
        except CapacityError:
            self.free()
            raise

    def free(self) -> None:
        """Give slot and pages back, and with them what was computed."""
        for lease in (self.pages, self.slot):
            if lease is not None:
                lease.end()
        self.pages = self.slot = None
        self.advance(0)
