"""Everything that can happen to one request, in one queue: its stream's messages, the engine's events, its session's
reports. A service handles a request as a sequence of `get`s, so there is one place where it waits and one where it
ends."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Self, TypeVar

from google.protobuf.message import Message

from runtime.errors import DeadlineError

MessageT = TypeVar("MessageT", bound=Message)
EventT = TypeVar("EventT")


MAX_UNREAD = 16


@dataclass(frozen=True)
class StreamEnded:
    """The caller half-closed: it has nothing more to say and still listens."""


@dataclass(frozen=True)
class SessionChanged:
    """A stage reported; the session itself knows what."""


class Inbox(Generic[MessageT, EventT]):
    """Use as a context manager on the event loop's thread; leaving it stops the reader of the stream.

    A request makes as many entries as it has tokens and stages, so these need no bound of their own. Of the caller's
    messages no more than `MAX_UNREAD` are read ahead.
    """

    def __init__(self, stream: AsyncIterator[MessageT]) -> None:
        self._stream = stream
        self._queue: asyncio.Queue[MessageT | EventT | StreamEnded | SessionChanged] = asyncio.Queue()
        self._room = asyncio.Semaphore(MAX_UNREAD)
        self._loop = asyncio.get_running_loop()
        self._reader: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        self._reader = asyncio.create_task(self._read())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._reader is not None:
            self._reader.cancel()

    async def _read(self) -> None:
        async for message in self._stream:
            await self._room.acquire()
            self._queue.put_nowait(message)
        self._queue.put_nowait(StreamEnded())

    def emit(self, event: EventT) -> None:
        """An engine event; any thread."""
        self._loop.call_soon_threadsafe(self._queue.put_nowait, event)

    def session_changed(self) -> None:
        """Event loop's thread."""
        self._queue.put_nowait(SessionChanged())

    async def get(self, timeout_s: float | None, waiting_for: str) -> MessageT | EventT | StreamEnded | SessionChanged:
        """The next thing that happened. `timeout_s` None waits as long as the stream lives.

        Raises:
            DeadlineError: nothing happened in time; the message says what was waited for.
        """
        try:
            # Not wait_for: before Python 3.12 it loses a cancellation that meets an item.
            async with asyncio.timeout(timeout_s):
                item = await self._queue.get()
        except TimeoutError:
            raise DeadlineError(f"gave up waiting for {waiting_for}") from None
        if isinstance(item, Message):
            self._room.release()
        return item
