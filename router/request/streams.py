"""The two halves of a request in flight: its run on a prefill worker, on one after the other if need be, and its stay
in a decode pool, from the offer of its prompt to its last token."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from protos import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, transfer_pb2, types_pb2
from router.request.worker_stream import (
    RETRY_PAUSE_S,
    Ended,
    FlowParts,
    StepsOver,
    WorkerStream,
    cancel,
    lost,
    may_retry,
    search,
    suspect,
)
from router.workers.worker import Booking, StepStream
from runtime.clock import HELD_UP_S
from runtime.errors import BatonError, CapacityError, PeerLostError

PrefillCall = WorkerStream[prefill_pb2.RunRequest, prefill_pb2.RunResponse]


class PrefillStream:
    """Attempts to run the prompt; the first one begins with `run`."""

    def __init__(self, parts: FlowParts, booking: Booking) -> None:
        self._parts = parts
        self._booking = booking
        self._tried: frozenset[str] = frozenset()
        self._attempts = 1
        self._search: asyncio.Task[None] | None = None
        self.has_first_token = False  # drawn by the present attempt
        self.stream: PrefillCall | None = None

    def run(self) -> None:
        """Run the prompt on the worker that is booked."""
        stub = prefill_pb2_grpc.PrefillStub(self._booking.worker.channel)
        self.stream = WorkerStream.open(stub.Run, self._booking.worker, self._parts.inbox.deliver, self._parts.group,
                                        self._parts.time_left_s())
        self.stream.send(prefill_pb2.RunRequest(request=self._parts.request))

    @property
    def address(self) -> str:
        return self._booking.worker.address

    @property
    def booking(self) -> Booking:
        return self._booking

    def deliver_to(self, destination: transfer_pb2.DestinationTerms) -> None:
        if self.stream is not None:
            self.stream.send(prefill_pb2.RunRequest(destination=destination))

    def let_go(self) -> None:
        """The pool has what it sent."""
        if self.stream is not None:
            self.stream.half_close()

    def computed(self) -> None:
        """The prompt waits for nothing on that worker any more."""
        self.has_first_token = True
        self._booking.computed()

    def overdue(self) -> BatonError:
        """The error of a worker that sent everything and reported nothing."""
        return PeerLostError("the prefill worker sent a handoff and did not send the first token in time")

    def move_on(self, error: BatonError, pool: Booking) -> None:
        """Run the prompt for this pool on another worker, or on the same one once it is back if there is no other.

        Raises:
            BatonError: `error`, if a retry cannot help or none is left.
        """
        self.close()
        suspect(self._booking, error)
        self._tried |= {self.address}
        if self._attempts >= self._parts.limits.prefill_attempts or not may_retry(error):
            raise error
        self._search = self._parts.group.create_task(self._reopen(error, pool))

    def close(self) -> None:
        """Idempotent."""
        cancel(self._search)
        if self.stream is not None:
            self.stream.close()
        self._booking.release()

    async def _reopen(self, error: BatonError, pool: Booking) -> None:
        await asyncio.sleep(RETRY_PAUSE_S)
        directory, prompt = self._parts.directory, self._parts.prompt
        self._booking = await search(
            directory, lambda: directory.book_prefill(prompt, pool, tried=self._tried,
                                                      context_tokens=self._parts.context_tokens),
            self._parts.limits.comeback_s(directory), error)
        self._attempts += 1
        self.has_first_token = False
        self.run()


DecodeCall = WorkerStream[decode_pb2.DecodeRequest, decode_pb2.DecodeResponse]

MAX_RETRY_PAUSE_S = 0.5


class DecodeStream:
    """One reservation in a decode pool, offered to pool after pool until one takes it. What the pool draws comes by the
    steps of its worker. Satisfies `router.workers.worker.StepReceiver`.

    `due_at` is the loop time by which the pool's answer is due, None while none is.
    """

    def __init__(self, parts: FlowParts, booking: Booking, on_step: Callable[[decode_pb2.StepEvent], None],
                 replayed: Sequence[int] = ()) -> None:
        """`on_step` is called as the steps arrive. `replayed`: output tokens after the first that the client has, of a
        request that moves here."""
        self._parts = parts
        self._booking = booking
        self._on_step = on_step
        self._replayed = tuple(replayed)
        self._steps: StepStream | None = None
        self._steps_key = 0
        self._search: asyncio.Task[None] | None = None
        self._tried: frozenset[str] = frozenset()
        self._refused_since: float | None = None
        self._source: transfer_pb2.SourceTerms | None = None
        self._first_token: types_pb2.TokenChunk | None = None
        self._num_offers = 0  # on the present stream; the epoch of destination terms is that of the offer they answer
        self._is_destination_due = False
        self.asks_alone = False  # whether the pool was asked to compute the rest itself, and has not answered
        self.stream: DecodeCall | None = None
        self.has_reserved = False
        self.due_at: float | None = None

    @property
    def address(self) -> str:
        return self._booking.worker.address

    @property
    def booking(self) -> Booking:
        return self._booking

    @property
    def compatibility(self) -> str:
        return self._booking.compatibility

    @property
    def may_compute_rest(self) -> bool:
        """Whether nearly all of the prompt is there, by what the pool has reported, and nothing was drawn elsewhere."""
        num_held = self._booking.num_held
        return num_held > 0 and not self._replayed and self._booking.worker.may_compute(
            self._parts.prompt.num_tokens - num_held)

    def ask_alone(self) -> None:
        """Let the pool compute what it lacks of the prompt; it may refuse."""
        self.asks_alone = True
        self._open(None)

    def took_alone(self) -> None:
        """It does so."""
        self.asks_alone, self.has_reserved = False, True
        self._is_destination_due, self.due_at = False, None
        self._booking.reserved()

    def refused_alone(self, error: BatonError) -> None:
        """It does not: it waits for a source's offer. Raises `error` if nobody could do better."""
        if not may_retry(error):
            raise error
        self.asks_alone = self._is_destination_due = False
        self._close_stream()

    def offer(self, source: transfer_pb2.SourceTerms) -> None:
        """Reserve for what this prefill worker will send; a later source takes over the same reservation.

        Raises:
            PeerLostError: the pool that was booked has started anew since, perhaps as another.
        """
        self._source = source
        if self.stream is not None:
            self.stream.send(decode_pb2.DecodeRequest(new_source=source))
            self._expect_destination()
        elif self._search is None or self._search.done():
            if self._booking.is_outlived:
                raise PeerLostError("the decode worker started anew while the request queued")
            self._open(source)

    def source_lost(self) -> None:
        """The prefill worker is gone; the next one makes a new offer. The pool is notified, so that it waits for it; a
        pool that may still refuse is notified when it has reserved."""
        self._source = None
        if self.has_reserved:
            self._send_source_lost()
        if not self._is_destination_due:
            self.due_at = None

    def first_token(self, token: types_pb2.TokenChunk) -> None:
        """Sent when the pool has reserved: what is sent to a pool that refuses would hide why it did. Only the first
        call counts."""
        if self._first_token is not None:
            return
        self._first_token = token
        if self.has_reserved:
            self._send_first_token(token)

    def reserved(self, destination: transfer_pb2.DestinationTerms) -> bool:
        """Destination terms arrived; False if they answer an offer that was overtaken, or whose worker is gone: the
        successor that queues gets terms of its own when it has started."""
        if not self.has_reserved and self._first_token is not None:
            self._send_first_token(self._first_token)
        if not self.has_reserved and self._source is None:
            self._send_source_lost()
        self.has_reserved = True
        self._booking.reserved()
        if destination.epoch != self._num_offers - 1:
            return False
        self._is_destination_due, self.due_at = False, None
        return self._source is not None

    def expect_commit(self) -> None:
        self._owe(self._parts.limits.commit_s)

    @property
    def lacks_first_token(self) -> bool:
        """Whether it cannot give the commit that is due, because no worker has sent the first token."""
        return not self._is_destination_due and self._first_token is None

    def committed(self) -> None:
        self.due_at = None

    def excused(self) -> bool:
        """Whether nothing is due any more, or `due_at` has passed while this router did not run, as when its process
        was held up: what the pool sent is read first."""
        if self.due_at is None:
            return True
        now = asyncio.get_running_loop().time()
        if now - self.due_at < HELD_UP_S:
            return False
        self.due_at = now + HELD_UP_S
        return True

    def overdue(self) -> BatonError:
        """What it means that `due_at` has passed."""
        missing = "commit a handoff that was sent" if self.has_reserved else "answer a reservation"
        return PeerLostError(f"the decode worker did not {missing} in time")

    def move_on(self, error: BatonError) -> None:
        """Offer it to the next pool. When all have refused, offer it again until one takes it or the time is up.

        Raises:
            BatonError: `error`, if no pool could do better.
        """
        if not may_retry(error):
            raise error
        self._close_stream()
        suspect(self._booking, error)
        self._tried |= {self.address}
        # What the prompt's source sends must fit, which is more than what fits the pool that is left.
        wanted = self.compatibility if self._source is None else self._source.compatibility
        self._search = self._parts.group.create_task(self._reopen(error, wanted))

    def stepped(self, event: decode_pb2.StepEvent) -> None:
        try:
            self._on_step(event)
        except Exception as error:  # noqa: BLE001 - it ends this request, and no other one
            self.steps_over(error)

    def steps_lost(self, reason: str) -> None:
        self._leave_steps()
        if self.stream is not None:
            self._parts.inbox.post(Ended(self.stream, lost(self._booking.worker, reason)))

    def steps_over(self, error: Exception | None = None) -> None:
        """The request has all that it needs, or cannot go on for this error."""
        self._leave_steps()
        self._parts.inbox.post(StepsOver(error))

    def close(self) -> None:
        """Idempotent."""
        cancel(self._search)
        self._close_stream()
        self._booking.release()

    def _close_stream(self) -> None:
        self._leave_steps()
        if self.stream is not None:
            self.stream.close()
        self.stream, self.due_at = None, None

    def _leave_steps(self) -> None:
        if self._steps is not None:
            self._steps.leave(self._steps_key)

    async def _reopen(self, error: BatonError, compatibility: str) -> None:
        """The old booking stays until there is a new one: what waits here goes before what admission still holds."""
        directory, prompt = self._parts.directory, self._parts.prompt
        book = partial(directory.book_decode, prompt, compatibility, context_tokens=self._parts.context_tokens)
        booking = book(tried=self._tried)
        if booking is None:
            patience_s = self._patience_s(error, compatibility)
            if patience_s <= 0:
                raise error
            await self._pause()
            self._tried = frozenset()
            booking = await search(directory, lambda: book(tried=frozenset()), patience_s, error)
        self._booking.release()
        self._booking = booking
        if self._source is not None:
            self._open(self._source)

    async def _pause(self) -> None:
        """Until something may have changed in the pools."""
        await asyncio.sleep(RETRY_PAUSE_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(MAX_RETRY_PAUSE_S):
                await self._parts.directory.changed()

    def _open(self, source: transfer_pb2.SourceTerms | None) -> None:
        worker = self._booking.worker
        stub = decode_pb2_grpc.DecodeStub(worker.channel)
        self._steps = worker.steps()
        self._steps_key = self._steps.join(self)
        self.stream = WorkerStream.open(stub.Generate, worker, self._parts.inbox.deliver, self._parts.group,
                                        self._parts.time_left_s())
        self._num_offers = 0
        message = decode_pb2.DecodeRequest(open=decode_pb2.DecodeOpen(
            source=source, replayed_token_ids=self._replayed, steps_id=self._steps.steps_id,
            steps_key=self._steps_key))
        message.open.request.CopyFrom(self._parts.request)  # last: a message within messages is copied with each
        self.stream.send(message)
        self._expect_destination()

    def _send_first_token(self, token: types_pb2.TokenChunk) -> None:
        if self.stream is not None:
            self.stream.send(decode_pb2.DecodeRequest(first_token=token))

    def _send_source_lost(self) -> None:
        if self.stream is not None:
            self.stream.send(decode_pb2.DecodeRequest(source_lost=decode_pb2.DecodeSourceLost()))

    def _patience_s(self, error: BatonError, compatibility: str) -> float:
        """What is left of it since the first refusal: more where pools live and are only full."""
        now = asyncio.get_running_loop().time()
        self._refused_since = now if self._refused_since is None else self._refused_since
        is_full = isinstance(error, CapacityError) and self._parts.directory.has_decode(
            compatibility, self._parts.context_tokens)
        limits = self._parts.limits
        patience_s = limits.capacity_wait_s if is_full else limits.comeback_s(self._parts.directory)
        return self._refused_since + patience_s - now

    def _expect_destination(self) -> None:
        self._num_offers += 1
        self._is_destination_due = True
        self._owe(self._parts.limits.reserve_s)

    def _owe(self, seconds: float) -> None:
        self.due_at = asyncio.get_running_loop().time() + seconds
