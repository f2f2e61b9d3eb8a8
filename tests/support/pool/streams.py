"""The router's end of a worker's stream, with the handler in this process and no gRPC between."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")


@dataclass(frozen=True)
class CallContext:
    """What a handler asks its context: the seconds that the caller's deadline leaves; None without one."""

    remaining_s: float | None = None

    def time_remaining(self) -> float | None:
        return self.remaining_s


class Stream(Generic[RequestT, ResponseT]):
    """Runs the handler in a task of its own. `responses` are those that nobody has taken yet."""

    def __init__(self, method: Callable[[AsyncIterator[RequestT], Any], AsyncIterator[ResponseT]], *,
                 remaining_s: float | None = None) -> None:
        self._messages: asyncio.Queue[RequestT | None] = asyncio.Queue()
        self.responses: asyncio.Queue[ResponseT] = asyncio.Queue()
        self._handler = asyncio.create_task(self._serve(method, CallContext(remaining_s)))

    def send(self, message: RequestT) -> None:
        self._messages.put_nowait(message)

    def half_close(self) -> None:
        self._messages.put_nowait(None)

    async def next(self, timeout_s: float = 60) -> ResponseT:
        async with asyncio.timeout(timeout_s):
            return await self.responses.get()

    async def ended(self, timeout_s: float = 60) -> None:
        """Raises what the stream ended with."""
        async with asyncio.timeout(timeout_s):
            await self._handler

    async def drop(self) -> None:
        """The caller is gone: gRPC cancels the handler."""
        self._handler.cancel()
        await asyncio.wait([self._handler])

    async def _serve(self, method: Callable[[AsyncIterator[RequestT], Any], AsyncIterator[ResponseT]],
                     context: CallContext) -> None:
        async with aclosing(cast("AsyncGenerator[ResponseT, None]", method(self._read(), context))) as responses:
            async for response in responses:
                self.responses.put_nowait(response)

    async def _read(self) -> AsyncIterator[RequestT]:
        while (message := await self._messages.get()) is not None:
            yield message
