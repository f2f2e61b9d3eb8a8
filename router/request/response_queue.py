"""Between a request's flow and its client: a bounded queue that notices a client who does not read."""

import asyncio
from collections import deque
from typing import Self

from protos import generation_pb2
from runtime.errors import RequestAborted

MAX_UNREAD = 64


class ResponseQueue:
    """Messages of one stream. `put` waits while `MAX_UNREAD` chunks are unread; a finish is always taken at once. What
    is unread when the queue closes has the stall limit to be read: all of it, so that a trickle does not go on."""

    def __init__(self, stall_limit_s: float) -> None:
        self._stall_limit_s = stall_limit_s
        self._unread: deque[generation_pb2.GenerateResponse] = deque()
        self._changed = asyncio.Event()
        self._ends_at: float | None = None  # loop time, of a queue that is closed

    async def put(self, response: generation_pb2.GenerateResponse) -> None:
        """Raises RequestAborted if the client has read nothing for the stall limit."""
        try:
            async with asyncio.timeout(self._stall_limit_s):
                while len(self._unread) >= MAX_UNREAD and not response.HasField("finish"):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise RequestAborted(f"the client has read nothing for {self._stall_limit_s:g} s") from None
        self._unread.append(response)
        self._changed.set()

    def close(self) -> None:
        """Nothing more will be put."""
        if self._ends_at is None:
            self._ends_at = asyncio.get_running_loop().time() + self._stall_limit_s
        self._changed.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> generation_pb2.GenerateResponse:
        """The next message, until the queue is closed and empty. Raises RequestAborted for messages that were not read
        within the stall limit from the closing."""
        if self._unread and self._ends_at is not None and asyncio.get_running_loop().time() > self._ends_at:
            raise RequestAborted(f"the client has not read the end of its stream for {self._stall_limit_s:g} s")
        while not self._unread:
            if self._ends_at is not None:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        self._changed.set()
        return self._unread.popleft()
