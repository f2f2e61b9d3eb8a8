"""What can happen to one request on a pool, in one queue, so that there is one place where the request waits."""

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import Message
from prometheus_client import Counter

from runtime.errors import DeadlineError

MessageT = TypeVar("MessageT", bound=Message)
EventT = TypeVar("EventT")

MAX_UNREAD = 32  # what a router sends for one request is a handful, and reads of `prefill.outlet.MAX_UNREAD_SCORES`


@dataclass(frozen=True)
class SessionChanged:
    """A stage reported; the session holds what."""


class Inbox(Generic[MessageT, EventT]):
    """The router's messages, the engine's events and the session's reports. One reader; event loop's thread.

    A request makes as many entries as it has tokens and stages, so these need no bound of their own. Of the router's
    messages `MAX_UNREAD` are kept.
    """

    def __init__(self, expired: Counter) -> None:
        """`expired` counts waits that took too long."""
        self._expired = expired
        self._items: deque[MessageT | EventT | SessionChanged] = deque()
        self._num_unread = 0  # messages among them
        self._reader: asyncio.Future[None] | None = None  # that waits for an item

    def received(self, message: MessageT) -> bool:
        """From the router. False if more are unread than a router sends."""
        if self._num_unread >= MAX_UNREAD:
            return False
        self._num_unread += 1
        self._put(message)
        return True

    def happened(self, event: EventT) -> None:
        """Of the engine."""
        self._put(event)

    def session_changed(self) -> None:
        self._put(SessionChanged())

    async def get(self, timeout_s: float | None, waiting_for: str) -> MessageT | EventT | SessionChanged:
        """The next thing that happened. `timeout_s` None waits as long as the request lives.

        Raises:
            DeadlineError: nothing happened in time; the message names what was waited for.
        """
        if not self._items:
            await self._wait(timeout_s, waiting_for)
        item = self._items.popleft()
        self._num_unread -= isinstance(item, Message)
        return item

    async def _wait(self, timeout_s: float | None, waiting_for: str) -> None:
        self._reader = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await self._reader
        except TimeoutError:
            self._expired.inc()
            raise DeadlineError(f"gave up waiting for {waiting_for}") from None

    def _put(self, item: MessageT | EventT | SessionChanged) -> None:
        self._items.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
