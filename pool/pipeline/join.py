"""The stream of a rank that joins the pipeline of its leader.

Its reports are sent in order while commands arrive. The stream has its own writer task, which ends
with it. (An iterator passed to grpc would be awaited by a task that outlives the call, one more
each time a stage joins.)
"""

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Self

import grpc

from protos import pipeline_pb2 as pb
from runtime.errors import PeerLostError
from transfer.plan import codec
from transfer.plan.handoff_terms import StageSessionEvent

JoinCall = grpc.aio.StreamStreamCall[pb.JoinRequest, pb.JoinResponse]
EVENT_LIMIT = 65536  # reports of a follower


class JoinStream:
    """The follower's side of a Join call. Belongs to the event loop's thread.

    Use it as an async context manager: leaving the block ends the call. Reports are queued from the
    beginning of the block, because a command of the leader may be read before the task that wrote
    the hello continues. `is_open` is True once the hello was written.
    """

    def __init__(self, call: JoinCall, hello: pb.StageHello) -> None:
        self._call = call
        self._hello = hello
        self._outbox: asyncio.Queue[pb.JoinRequest | None] = asyncio.Queue(EVENT_LIMIT)
        self._is_overrun = False
        self._is_closed = False
        self._writer: asyncio.Task[None] | None = None
        self.is_open = False

    async def __aenter__(self) -> Self:
        self._writer = asyncio.create_task(self._write())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_closed = True
        self.is_open = False
        self._call.cancel()
        assert self._writer is not None
        self._writer.cancel()
        await asyncio.gather(self._writer, return_exceptions=True)

    def send(self, request: pb.JoinRequest) -> None:
        """Queue one report, to be sent after the hello; do nothing after the end of the block.

        A leader that leaves thousands unread counts as dead, so the stream ends.
        """
        if not self._is_closed:
            self._put(request)

    def end(self) -> None:
        """Half-close after all queued reports; the leader then counts this stage as lost."""
        if not self._is_closed:
            self._put(None)

    async def receive(self) -> pb.JoinResponse | None:
        """Return the next command, or None when the leader has ended the stream.

        Raises:
            grpc.aio.AioRpcError: it was cut or refused.
            PeerLostError: the leader did not read this stage's reports.
        """
        try:
            command = await self._call.read()
        except asyncio.CancelledError:
            if self._is_overrun:
                raise PeerLostError(
                    f"the leader has left {EVENT_LIMIT} reports of this stage unread"
                ) from None
            raise
        return command if isinstance(command, pb.JoinResponse) else None

    def _put(self, request: pb.JoinRequest | None) -> None:
        try:
            self._outbox.put_nowait(request)
        except asyncio.QueueFull:
            self._is_overrun = True
            self._call.cancel()

    async def _write(self) -> None:
        # The reader raises the reason for which a call ended.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._call.write(pb.JoinRequest(hello=self._hello))
            self.is_open = True
            while (request := await self._outbox.get()) is not None:
                await self._call.write(request)
            await self._call.done_writing()


class JoinReports:
    """The port of a follower's transfer agent: sends its reports to a joined leader."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.stream: JoinStream | None = None

    def report(self, event: StageSessionEvent) -> None:
        """Send a report to the leader. Any thread."""
        self._loop.call_soon_threadsafe(self._report, event)

    def _report(self, event: StageSessionEvent) -> None:
        if self.stream is not None:
            self.stream.send(pb.JoinRequest(session=codec.event_to_proto(event)))
