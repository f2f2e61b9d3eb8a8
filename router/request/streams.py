"""The two halves of a request in flight: its run on a prefill worker, on one after the other if
need be, and its stay in a decode pool, from the offer of its prompt to its last token."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from protos import decode_pb2, prefill_pb2, transfer_pb2, types_pb2
from router.request.retries import RETRY_PAUSE_S, may_retry, search, suspect
from router.request.worker_stream import DueTimer, Ended, FlowParts, WorkerStream
from router.workers.worker import Booking
from runtime.errors import BatonError, CapacityError, PeerLostError


class PrefillStream:
    """Attempts to run the prompt; the first one begins with `run`."""

    def __init__(self, parts: FlowParts, booking: Booking) -> None:
        self._parts = parts
        self._booking = booking
        self._tried: frozenset[str] = frozenset()
        self._attempts = 1
        self._search: asyncio.Task[None] | None = None
        self.has_first_token = False  # drawn by the present attempt
        self.stream: WorkerStream[prefill_pb2.PrefillInput, prefill_pb2.PrefillEvent] | None = None

    def run(self) -> None:
        """Run the prompt on the worker that is booked."""
        worker = self._booking.worker
        opening = prefill_pb2.PrefillInput()
        opening.open.context.CopyFrom(self._parts.context())
        opening.open.request.CopyFrom(self._parts.request)
        self.stream = WorkerStream.open(
            worker, worker.prefill_calls.current(), opening, self._parts.deliver
        )

    @property
    def address(self) -> str:
        return self._booking.worker.address

    @property
    def booking(self) -> Booking:
        return self._booking

    def deliver_to(self, destination: transfer_pb2.DestinationTerms) -> None:
        if self.stream is not None:
            self.stream.send(prefill_pb2.PrefillInput(destination=destination))

    def let_go(self) -> None:
        """The pool has what it sent."""
        if self.stream is not None:
            self.stream.send(prefill_pb2.PrefillInput(release=prefill_pb2.PrefillRelease()))
            self.stream.let_end()

    def scores_read(self) -> None:
        """The client has taken one more message of them."""
        if self.stream is None:
            return
        unsent = self.stream.unsent
        if unsent is not None and unsent.HasField("scores_read"):
            unsent.scores_read.count += 1
        else:
            self.stream.send(
                prefill_pb2.PrefillInput(scores_read=prefill_pb2.PrefillScoresRead(count=1))
            )

    def computed(self) -> None:
        """The prompt waits for nothing on that worker any more."""
        self.has_first_token = True
        self._booking.computed()

    def overdue(self) -> BatonError:
        """The error of a worker that sent everything and reported nothing."""
        return PeerLostError(
            "the prefill worker sent a handoff and did not send the first token in time"
        )

    def move_on(self, error: BatonError, pool: Booking) -> None:
        """Run the prompt for this pool on another worker, or on the same one once it is back if
        there is no other.

        Raises:
            BatonError: `error`, if a retry cannot help or none is left.
        """
        self.close()
        self.stream, self.has_first_token = None, False  # no answer of that attempt counts any more
        suspect(self._booking, error)
        self._tried |= {self.address}
        if self._attempts >= self._parts.limits.prefill_attempts or not may_retry(error):
            raise error
        self._search = self._parts.group.create_task(self._reopen(error, pool))

    def close(self) -> None:
        """Idempotent."""
        _cancel(self._search)
        if self.stream is not None:
            self.stream.close()
        self._booking.release()

    async def _reopen(self, error: BatonError, pool: Booking) -> None:
        await asyncio.sleep(RETRY_PAUSE_S)
        directory, prompt = self._parts.directory, self._parts.prompt
        self._booking = await search(
            directory,
            lambda: directory.book_prefill(
                prompt, pool, tried=self._tried, context_tokens=self._parts.context_tokens
            ),
            self._parts.limits.restart_estimate_s(directory),
            error,
        )
        self._attempts += 1
        self.run()


MAX_RETRY_PAUSE_S = 0.5


class DecodeStream:
    """One reservation in a decode pool, offered to pool after pool until one takes it, and what
    that draws."""

    def __init__(self, parts: FlowParts, booking: Booking, replayed: Sequence[int] = ()) -> None:
        """`replayed`: output tokens after the first that the client has, of a request that moves
        here."""
        self._parts = parts
        self._booking = booking
        self._replayed = tuple(replayed)
        self._search: asyncio.Task[None] | None = None
        self._tried: frozenset[str] = frozenset()
        self._refused_since: float | None = None
        self._source: transfer_pb2.SourceTerms | None = None
        self._first_token: types_pb2.TokenChunk | None = None
        # on the present stream; the epoch of destination terms is that of the offer they answer
        self._num_offers = 0
        self._is_destination_due = False
        self.local_prefill_requested = (
            False  # whether the pool was asked to compute the rest itself, and has not answered
        )
        self._due = DueTimer(parts.overdue)
        self.stream: WorkerStream[decode_pb2.DecodeInput, decode_pb2.DecodeEvent] | None = None
        self.has_reserved = False

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
        """Whether nearly all of the prompt is there, by what the pool has reported, and nothing was
        drawn elsewhere."""
        num_held = self._booking.num_held
        return (
            num_held > 0
            and not self._replayed
            and self._booking.worker.may_compute(self._parts.prompt.num_tokens - num_held)
        )

    def request_local_prefill(self) -> None:
        """Let the pool compute what it lacks of the prompt; it may refuse."""
        self.local_prefill_requested = True
        self._open(None)

    def local_prefill_accepted(self) -> None:
        """It does so."""
        self.local_prefill_requested, self.has_reserved = False, True
        self._is_destination_due = False
        self._due.settle()
        self._booking.reserved()

    def local_prefill_rejected(self, error: BatonError) -> None:
        """It does not: it waits for a source's offer. Raises `error` if nobody could do better."""
        if not may_retry(error):
            raise error
        self.local_prefill_requested = self._is_destination_due = False
        self._close_stream()

    def offer(self, source: transfer_pb2.SourceTerms) -> None:
        """Reserve for what this prefill worker will send; a later source takes over the same
        reservation.

        Raises:
            PeerLostError: the pool that was booked has started anew since, perhaps as another.
        """
        self._source = source
        if self.stream is not None:
            self.stream.send(decode_pb2.DecodeInput(new_source=source))
            self._expect_destination()
        elif self._search is None or self._search.done():
            if self._booking.is_outlived:
                raise PeerLostError("the decode worker started anew while the request queued")
            self._open(source)

    def source_lost(self) -> None:
        """The prefill worker is gone; the next one makes a new offer. The pool is notified, so that
        it waits for it; a pool that may still refuse is notified when it has reserved."""
        self._source = None
        if self.has_reserved:
            self._send_source_lost()
        if not self._is_destination_due:
            self._due.settle()

    def first_token(self, token: types_pb2.TokenChunk) -> None:
        """Sent when the pool has reserved: what is sent to a pool that refuses would hide why it
        did. Only the first call counts."""
        if self._first_token is not None:
            return
        self._first_token = token
        if self.has_reserved:
            self._send_first_token(token)

    def reserved(self, destination: transfer_pb2.DestinationTerms) -> bool:
        """Destination terms arrived; False if they answer an offer that was overtaken, or whose
        worker is gone: the successor that queues gets terms of its own when it has started."""
        if not self.has_reserved and self._first_token is not None:
            self._send_first_token(self._first_token)
        if not self.has_reserved and self._source is None:
            self._send_source_lost()
        self.has_reserved = True
        self._booking.reserved()
        if destination.epoch != self._num_offers - 1:
            return False
        self._is_destination_due = False
        self._due.settle()
        return self._source is not None

    def expect_commit(self) -> None:
        self._due.owe(self._parts.limits.commit_s)

    @property
    def lacks_first_token(self) -> bool:
        """Whether it cannot give the commit that is due, because no worker has sent the first
        token."""
        return not self._is_destination_due and self._first_token is None

    def committed(self) -> None:
        self._due.settle()

    def finished(self) -> None:
        """It has drawn everything, and ends the request by itself."""
        if self.stream is not None:
            self.stream.let_end()

    @property
    def is_overdue(self) -> bool:
        """Whether its answer has not come in time."""
        return self._due.is_over

    def overdue(self) -> BatonError:
        """What it means that its answer has not come."""
        missing = "commit a handoff that was sent" if self.has_reserved else "answer a reservation"
        return PeerLostError(f"the decode worker did not {missing} in time")

    def move_on(self, error: BatonError) -> None:
        """Offer it to the next pool. When all have refused, offer it again until one takes it or
        the time is up.

        Raises:
            BatonError: `error`, if no pool could do better.
        """
        if not may_retry(error):
            raise error
        self._close_stream()
        suspect(self._booking, error)
        self._tried |= {self.address}
        # What the prompt's source sends must fit, which is more than what fits the pool that is
        # left.
        wanted = self.compatibility if self._source is None else self._source.compatibility
        self._search = self._parts.group.create_task(self._reopen(error, wanted))

    def broken(self, reason: str) -> None:
        """What it sent makes no sense: the request is lost there."""
        if self.stream is not None:
            self.stream.close()
            self._parts.deliver(Ended(self.stream, lost=reason))

    def close(self) -> None:
        """Idempotent."""
        _cancel(self._search)
        self._close_stream()
        self._booking.release()

    def _close_stream(self) -> None:
        self._due.close()
        if self.stream is not None:
            self.stream.close()
        self.stream = None

    async def _reopen(self, error: BatonError, compatibility: str) -> None:
        """The old booking stays until there is a new one: what waits here goes before what
        admission still holds."""
        directory, prompt = self._parts.directory, self._parts.prompt
        book = partial(
            directory.book_decode, prompt, compatibility, context_tokens=self._parts.context_tokens
        )
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
        worker, opening = self._booking.worker, decode_pb2.DecodeInput()
        opening.open.context.CopyFrom(self._parts.context())
        opening.open.replayed_token_ids.extend(self._replayed)
        if source is not None:
            opening.open.source.CopyFrom(source)
        opening.open.request.CopyFrom(self._parts.request)
        self.stream = WorkerStream.open(
            worker, worker.decode_calls.current(), opening, self._parts.deliver
        )
        self._num_offers = 0
        self._expect_destination()

    def _send_first_token(self, token: types_pb2.TokenChunk) -> None:
        if self.stream is not None:
            self.stream.send(decode_pb2.DecodeInput(first_token=token))

    def _send_source_lost(self) -> None:
        if self.stream is not None:
            self.stream.send(decode_pb2.DecodeInput(source_lost=decode_pb2.DecodeSourceLost()))

    def _patience_s(self, error: BatonError, compatibility: str) -> float:
        """What is left of it since the first refusal: more where pools live and are only full."""
        now = asyncio.get_running_loop().time()
        self._refused_since = now if self._refused_since is None else self._refused_since
        is_full = isinstance(error, CapacityError) and self._parts.directory.has_decode(
            compatibility, self._parts.context_tokens
        )
        limits = self._parts.limits
        patience_s = (
            limits.capacity_wait_s if is_full else limits.restart_estimate_s(self._parts.directory)
        )
        return self._refused_since + patience_s - now

    def _expect_destination(self) -> None:
        self._num_offers += 1
        self._is_destination_due = True
        self._due.owe(self._parts.limits.reserve_s)


def _cancel(task: asyncio.Task[None] | None) -> None:
    """End a search, unless the caller is that search."""
    if task is not None and task is not asyncio.current_task():
        task.cancel()
