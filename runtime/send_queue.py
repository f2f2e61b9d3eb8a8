"""What waits to be sent for requests that share one stream of messages: each end of such a stream has one for what it
sends. Whatever is due together goes into one message, in order for each request.

An end that is read slowly sends fewer and longer messages. What waits for a request is bounded by what the request may
send, and how many requests there are by whoever opens them.
"""

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


@dataclass(frozen=True)
class MessageLimits:
    """Of one message: as many items as its reader handles without a pause, and no more weight, in whatever its sender
    counts, but for an item that has more by itself."""

    max_items: int
    max_weight: int


class SendQueue(Generic[ItemT]):
    """One reader, on the event loop's thread, as everybody else."""

    def __init__(self, limits: MessageLimits) -> None:
        self._limits = limits
        self._waiting: dict[int, deque[tuple[ItemT, int]]] = {}  # with weights; by key, in order of their first items
        self._reader: asyncio.Future[None] | None = None  # that waits for an item
        self._is_closed = False
        self._error: Exception | None = None

    def __len__(self) -> int:
        """Requests for which something waits."""
        return len(self._waiting)

    def put(self, key: int, item: ItemT, weight: int = 1) -> None:
        """Never waits."""
        items = self._waiting.get(key)
        if items is None:
            self._waiting[key] = items = deque()
        items.append((item, weight))
        self._wake()

    def newest(self, key: int) -> ItemT | None:
        """The last item that waits for this request: more may still be put into it."""
        items = self._waiting.get(key)
        return items[-1][0] if items else None

    def drop(self, key: int) -> tuple[ItemT, ...]:
        """Send none of what waits for this request; returns it."""
        return tuple(item for item, _ in self._waiting.pop(key, ()))

    def close(self, error: Exception | None = None) -> None:
        """Nothing more will be put; with an error, nothing more will be sent. Only the first call counts."""
        if not self._is_closed:
            self._is_closed, self._error = True, error
            self._wake()

    async def take(self) -> list[ItemT]:
        """The items of the next message; none when the queue is closed and all were taken. Raises the error that it was
        closed with."""
        while not self._waiting and not self._is_closed:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
            await asyncio.sleep(0)  # whoever was woken together with this has something to send, too
        if self._error is not None:
            raise self._error
        return self._message()

    def _message(self) -> list[ItemT]:
        taken, total = list[ItemT](), 0
        while self._waiting and len(taken) < self._limits.max_items:
            key, items = next(iter(self._waiting.items()))
            item, weight = items[0]
            total += weight
            if taken and total > self._limits.max_weight:
                break
            taken.append(item)
            items.popleft()
            if not items:
                del self._waiting[key]
        return taken

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
