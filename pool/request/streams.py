"""The inputs and events of one request in a router's call."""

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import Message
from prometheus_client import Counter

from protos import decode_pb2, prefill_pb2
from runtime.errors import BatonError, DeadlineError
from runtime.queue_reader import QueueReader
from runtime.rpc.calls import SendQueue

InputT = TypeVar("InputT", prefill_pb2.PrefillInput, decode_pb2.DecodeInput)
EventT = TypeVar("EventT", prefill_pb2.PrefillEvent, decode_pb2.DecodeEvent)
HappenedT = TypeVar("HappenedT")
MAX_UNREAD = 32  # messages of one request: a few inputs, and one read per score in flight


@dataclass(frozen=True)
class SessionChanged:
    """A change of the session's state by a report of a stage; the session holds the state."""


class Inbox(Generic[InputT, HappenedT]):
    """The router's messages, the engine's events and the session's changes of one request.

    It has one reader and belongs to the event loop's thread. Events are bounded by the request's
    tokens and stages; of the router's messages, at most `MAX_UNREAD` are kept.
    """

    def __init__(self, expired: Counter) -> None:
        """Create an empty inbox; `expired` counts waits that timed out."""
        self._expired = expired
        self._items: deque[InputT | HappenedT | SessionChanged] = deque()
        self._num_unread = 0  # router messages among them
        self._reader = QueueReader()

    def received(self, message: InputT) -> bool:
        """Add a message of the router; return False if too many are unread."""
        if self._num_unread >= MAX_UNREAD:
            return False
        self._num_unread += 1
        self._put(message)
        return True

    def happened(self, event: HappenedT) -> None:
        """Add an event of the engine."""
        self._put(event)

    def session_changed(self) -> None:
        self._put(SessionChanged())

    async def get(
        self, timeout_s: float | None, waiting_for: str, failure: type[BatonError] = DeadlineError
    ) -> InputT | HappenedT | SessionChanged:
        """Return the next item. With `timeout_s` None, wait as long as the request lives.

        Raises:
            BatonError: `failure`, on timeout; its message names `waiting_for`.
        """
        if not self._items:
            await self._wait(timeout_s, waiting_for, failure)
        item = self._items.popleft()
        self._num_unread -= isinstance(item, Message)
        return item

    async def _wait(
        self, timeout_s: float | None, waiting_for: str, failure: type[BatonError]
    ) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._reader.wait()
        except TimeoutError:
            self._expired.inc()
            raise failure(f"gave up waiting for {waiting_for}") from None

    def _put(self, item: InputT | HappenedT | SessionChanged) -> None:
        self._items.append(item)
        self._reader.wake()


class EventSender(Generic[EventT]):
    """The sender of one request's events. It sends nothing once the request is over."""

    def __init__(self, queue: SendQueue[EventT], key: int) -> None:
        self._queue: SendQueue[EventT] = queue
        self.key = key
        self.is_open = True

    def send(self, event: EventT, weight: int = 1) -> None:
        """Queue an event without waiting; `weight` is the most tokens that it may hold."""
        if self.is_open:
            self._queue.put(self.key, event, weight)

    @property
    def unsent(self) -> EventT | None:
        """Return the last event if it is unsent and may still be changed, or None."""
        return self._queue.newest(self.key)
