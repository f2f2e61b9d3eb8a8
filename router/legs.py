"""The two halves of a request in flight: its run on a prefill worker, its stay in a decode pool.

Each leg owns one booking and one stream at a time and knows how to move on to another worker. What it learns goes to
the flow through the inbox; a search that finds nobody in time raises in the flow's task group.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from protos import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, transfer_pb2, types_pb2
from router.directory import Directory
from router.streams import Ended, Received, WorkerStream
from router.worker import Booking
from runtime.errors import (
    BatonError,
    CapacityError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    PeerLostError,
    UnavailableError,
)

Event = Received[prefill_pb2.RunResponse] | Received[decode_pb2.DecodeResponse] | Ended
Inbox = asyncio.Queue[Event]

RETRY_PAUSE_S, MAX_RETRY_PAUSE_S = 0.05, 0.5


@dataclass(frozen=True)
class FlowLimits:
    """How patient a request is. `peer_wait_s` leaves a client without an answer for less than five seconds."""

    prefill_attempts: int = 3
    peer_wait_s: float = 4.0  # for a lost worker to be replaced or to come back
    capacity_wait_s: float = 60.0  # for room in a decode pool, when all refused
    reserve_s: float = 4.0  # a decode stream opened to its landing
    commit_s: float = 30.0  # the last byte sent to its commit
    migrations: int = 3  # decode pools that may be lost under one request
    linger_s: float = 1.0  # the last message to the end of the workers' streams


@dataclass(frozen=True)
class Leg:
    """What both legs need; `ends_at` is the loop time at which the request's time is up."""

    request: types_pb2.EngineRequest
    directory: Directory
    limits: FlowLimits
    inbox: Inbox
    group: asyncio.TaskGroup
    ends_at: float

    def time_left_s(self) -> float:
        return max(0.0, self.ends_at - asyncio.get_running_loop().time())


def may_retry(error: BatonError) -> bool:
    """Whether another worker could do better: not with a request that is wrong, a bug, or no time left."""
    return not isinstance(error, InvalidRequestError | InternalError | DeadlineError)


class PrefillLeg:
    """Attempts to run the prompt; the first one is opened by the flow."""

    def __init__(self, leg: Leg, booking: Booking) -> None:
        self._leg = leg
        self._booking = booking
        self._tried: frozenset[str] = frozenset()
        self._attempts = 0
        self._search: asyncio.Task[None] | None = None
        self.has_first_token = False  # drawn by the present attempt
        self.stream = self._open()

    @property
    def address(self) -> str:
        return self._booking.worker.address

    def deliver_to(self, landing: transfer_pb2.Landing) -> None:
        self.stream.send(prefill_pb2.RunRequest(landing=landing))

    def computed(self) -> None:
        """The prompt waits for nothing on that worker any more."""
        self.has_first_token = True
        self._booking.release()

    def move_on(self, error: BatonError, compatibility: str) -> None:
        """Run the prompt on another worker, or on the same one once it is back if there is no other.

        Raises:
            BatonError: `error`, if a retry cannot help or none is left.
        """
        self.close()
        _suspect(self._booking, error)
        self._tried |= {self.address}
        if self._attempts >= self._leg.limits.prefill_attempts or not may_retry(error):
            raise error
        self._search = self._leg.group.create_task(self._reopen(error, compatibility))

    def close(self) -> None:
        """Idempotent."""
        _cancel(self._search)
        self.stream.close()
        self._booking.release()

    async def _reopen(self, error: BatonError, compatibility: str) -> None:
        await asyncio.sleep(RETRY_PAUSE_S)
        directory, prompt = self._leg.directory, self._leg.request.prompt_token_ids
        self._booking = await _search(
            directory, lambda: directory.book_prefill(prompt, compatibility, tried=self._tried),
            self._leg.limits.peer_wait_s, error)
        self.stream = self._open()

    def _open(self) -> WorkerStream[prefill_pb2.RunRequest, prefill_pb2.RunResponse]:
        self._attempts += 1
        self.has_first_token = False
        stub = prefill_pb2_grpc.PrefillStub(self._booking.worker.channel)
        stream = WorkerStream(stub.Run, self._booking.worker, self._leg.inbox.put, self._leg.group,
                              self._leg.time_left_s())
        stream.send(prefill_pb2.RunRequest(request=self._leg.request))
        return stream


class DecodeLeg:
    """One reservation in a decode pool, offered to pool after pool until one takes it.

    `due_at` is the loop time by which the pool owes an answer, None while it owes none.
    """

    def __init__(self, leg: Leg, booking: Booking, replayed: Sequence[int] = ()) -> None:
        """`replayed`: output tokens after the first that the client has, of a request that moves here."""
        self._leg = leg
        self._booking = booking
        self._replayed = tuple(replayed)
        self._search: asyncio.Task[None] | None = None
        self._tried: frozenset[str] = frozenset()
        self._refused_since: float | None = None
        self._source: transfer_pb2.SourceTerms | None = None
        self._first_token: types_pb2.TokenChunk | None = None
        self._landings_due = 0
        self.stream: WorkerStream[decode_pb2.DecodeRequest, decode_pb2.DecodeResponse] | None = None
        self.has_landed = False
        self.due_at: float | None = None

    @property
    def address(self) -> str:
        return self._booking.worker.address

    @property
    def booking(self) -> Booking:
        return self._booking

    @property
    def compatibility(self) -> str:
        return self._booking.worker.compatibility

    def offer(self, source: transfer_pb2.SourceTerms) -> None:
        """Reserve for what this prefill worker will send; a later source takes over the same reservation."""
        self._source = source
        if self.stream is not None:
            self.stream.send(decode_pb2.DecodeRequest(new_source=source))
            self._expect_landing()
        elif self._search is None or self._search.done():
            self._open(source)

    def source_lost(self) -> None:
        """The prefill worker is gone; the next one makes a new offer."""
        self._source = None
        if not self._landings_due:
            self.due_at = None

    def first_token(self, token: types_pb2.TokenChunk) -> None:
        """Sent when the pool has landed: what is sent to a pool that refuses would hide why it did. Only the first call
        counts."""
        if self._first_token is not None:
            return
        self._first_token = token
        if self.has_landed:
            self._send_first_token(token)

    def landed(self) -> bool:
        """A landing arrived; False if it answers an offer that was overtaken."""
        if not self.has_landed and self._first_token is not None:
            self._send_first_token(self._first_token)
        self.has_landed = True
        self._booking.landed()
        self._landings_due -= 1
        if self._landings_due:
            return False
        self.due_at = None
        return True

    def expect_commit(self) -> None:
        self._owe(self._leg.limits.commit_s)

    def committed(self) -> None:
        self.due_at = None

    def overdue(self) -> BatonError:
        """What it means that `due_at` has passed."""
        missing = "commit a handoff that was sent" if self.has_landed else "answer a reservation"
        return PeerLostError(f"decode worker {self.address} did not {missing} in time")

    def move_on(self, error: BatonError) -> None:
        """Ask the next pool. When all have refused, ask again until one takes it or patience ends.

        Raises:
            BatonError: `error`, if no pool could do better.
        """
        if not may_retry(error):
            raise error
        if self.stream is not None:
            self.stream.close()
        self.stream, self.due_at = None, None
        _suspect(self._booking, error)
        self._tried |= {self.address}
        # What the prompt's source sends must fit, which is more than what fits the pool that is left.
        wanted = self.compatibility if self._source is None else self._source.compatibility
        self._search = self._leg.group.create_task(self._reopen(error, wanted))

    def close(self) -> None:
        """Idempotent."""
        _cancel(self._search)
        if self.stream is not None:
            self.stream.close()
        self.due_at = None
        self._booking.release()

    async def _reopen(self, error: BatonError, compatibility: str) -> None:
        """The old booking stays until there is a new one: what waits here goes before what admission still holds."""
        directory, prompt = self._leg.directory, self._leg.request.prompt_token_ids
        booking = directory.book_decode(prompt, compatibility, tried=self._tried)
        if booking is None:
            patience_s = self._patience_s(error, compatibility)
            if patience_s <= 0:
                raise error
            await self._pause()
            self._tried = frozenset()
            booking = await _search(
                directory, lambda: directory.book_decode(prompt, compatibility, tried=frozenset()), patience_s, error)
        self._booking.release()
        self._booking = booking
        if self._source is not None:
            self._open(self._source)

    async def _pause(self) -> None:
        """Until something may have changed in the pools."""
        await asyncio.sleep(RETRY_PAUSE_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(MAX_RETRY_PAUSE_S):
                await self._leg.directory.changed()

    def _open(self, source: transfer_pb2.SourceTerms) -> None:
        stub = decode_pb2_grpc.DecodeStub(self._booking.worker.channel)
        self.stream = WorkerStream(stub.Generate, self._booking.worker, self._leg.inbox.put, self._leg.group,
                                   self._leg.time_left_s())
        self._landings_due = 0
        self.stream.send(decode_pb2.DecodeRequest(open=decode_pb2.DecodeOpen(
            request=self._leg.request, source=source, replayed_token_ids=self._replayed)))
        self._expect_landing()

    def _send_first_token(self, token: types_pb2.TokenChunk) -> None:
        if self.stream is not None:
            self.stream.send(decode_pb2.DecodeRequest(first_token=token))

    def _patience_s(self, error: BatonError, compatibility: str) -> float:
        """What is left of it since the first refusal: more where pools live and are only full."""
        now = asyncio.get_running_loop().time()
        self._refused_since = now if self._refused_since is None else self._refused_since
        is_full = isinstance(error, CapacityError) and self._leg.directory.has_decode(compatibility)
        patience_s = self._leg.limits.capacity_wait_s if is_full else self._leg.limits.peer_wait_s
        return self._refused_since + patience_s - now

    def _expect_landing(self) -> None:
        self._landings_due += 1
        self._owe(self._leg.limits.reserve_s)

    def _owe(self, seconds: float) -> None:
        self.due_at = asyncio.get_running_loop().time() + seconds


def _cancel(task: asyncio.Task[None] | None) -> None:
    if task is not None and task is not asyncio.current_task():
        task.cancel()


async def _search(directory: Directory, attempt: Callable[[], Booking | None], wait_s: float,
                  error: BatonError) -> Booking:
    """A booking within `wait_s`, or the error that made it necessary."""
    try:
        async with asyncio.timeout(wait_s):
            return await directory.until(attempt)
    except TimeoutError:
        raise error from None


def _suspect(booking: Booking, error: BatonError) -> None:
    """A worker whose stream broke gets nothing more until it reports again."""
    if isinstance(error, UnavailableError):
        booking.worker.lost(str(error))
