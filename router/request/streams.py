"""The two halves of a request in flight: prefill attempts and the reservation in a decode pool.

`PrefillStream` runs the prompt on one prefill worker after another, until one succeeds.
`DecodeStream` covers the time from the offer of the prompt to the last token.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from protos import decode_pb2, prefill_pb2, transfer_pb2, types_pb2
from router.request.retries import RETRY_PAUSE_S, may_retry, search, suspect
from router.request.worker_stream import DueTimer, Ended, FlowParts, WorkerStream
from router.workers.worker import Booking
from runtime.clock import Deadline, LoopClock
from runtime.errors import BatonError, CapacityError, PeerLostError


class PrefillStream:
    """Attempts to prefill the prompt; `run` starts the first one."""

    def __init__(self, parts: FlowParts, booking: Booking) -> None:
        self._parts = parts
        self._booking = booking
        self._tried: frozenset[str] = frozenset()
        self._attempts = 1
        self._search: asyncio.Task[None] | None = None
        self.has_first_token = False  # sent by the current attempt
        self.stream: WorkerStream[prefill_pb2.PrefillInput, prefill_pb2.PrefillEvent] | None = None

    def run(self) -> None:
        """Start the prompt on the booked worker."""
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

    def release(self) -> None:
        """Tell the prefill worker that the pool has everything it sent."""
        if self.stream is not None:
            self.stream.send(prefill_pb2.PrefillInput(release=prefill_pb2.PrefillRelease()))
            self.stream.let_end()

    def scores_read(self) -> None:
        """Tell the worker that the client has taken one more message of scores."""
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
        """Record that the prompt no longer queues on that worker."""
        self.has_first_token = True
        self._booking.computed()

    def overdue(self) -> BatonError:
        """Return the error for a worker that sent the handoff but not the first token."""
        return PeerLostError(
            "the prefill worker sent a handoff and did not send the first token in time"
        )

    def move_on(self, error: BatonError, pool: Booking) -> None:
        """Run the prompt for this pool on another worker, or on the same one after its restart if
        no other exists.

        Raises:
            BatonError: `error`, if a retry cannot help or no attempt is left.
        """
        self.close()
        # Events of the failed attempt no longer count.
        self.stream = None
        self.has_first_token = False
        suspect(self._booking, error)
        self._tried |= {self.address}
        if self._attempts >= self._parts.limits.prefill_attempts or not may_retry(error):
            raise error
        self._search = self._parts.group.create_task(self._reopen(error, pool))

    def close(self) -> None:
        """Close the stream, stop a search and release the booking. Idempotent."""
        _cancel(self._search)
        if self.stream is not None:
            self.stream.close()
        self._booking.release()

    async def _reopen(self, error: BatonError, pool: Booking) -> None:
        await asyncio.sleep(RETRY_PAUSE_S)
        directory = self._parts.directory
        prompt = self._parts.prompt
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
    """One request on a decode pool: the reservation, offered to pool after pool, and its tokens."""

    def __init__(self, parts: FlowParts, booking: Booking, replayed: Sequence[int] = ()) -> None:
        """`replayed`: output tokens after the first that the client of a migrated request already
        has.
        """
        self._parts = parts
        self._booking = booking
        self._replayed = tuple(replayed)
        self._search: asyncio.Task[None] | None = None
        self._tried: frozenset[str] = frozenset()
        self._refused_since_s: float | None = None
        self._source: transfer_pb2.SourceTerms | None = None
        self._first_token: types_pb2.TokenChunk | None = None
        # Counts offers on the current stream. Destination terms carry the epoch of their offer.
        self._num_offers = 0
        self._is_destination_due = False
        # Whether the pool was asked to compute the rest of the prompt and has not answered yet.
        self.local_prefill_requested = False
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
        """Return whether the pool reported nearly all of the prompt as cached and no token was
        sampled elsewhere.
        """
        num_cached = self._booking.num_cached
        return (
            num_cached > 0
            and not self._replayed
            and self._booking.worker.may_compute(self._parts.prompt.num_tokens - num_cached)
        )

    def request_local_prefill(self) -> None:
        """Ask the pool to compute the part of the prompt that it lacks; it may refuse."""
        self.local_prefill_requested = True
        self._open(None)

    def local_prefill_accepted(self) -> None:
        """Record that the pool computes the rest of the prompt itself."""
        self.local_prefill_requested = False
        self.has_reserved = True
        self._is_destination_due = False
        self._due.settle()
        self._booking.reserved()

    def local_prefill_rejected(self, error: BatonError) -> None:
        """Handle a refusal to prefill locally: the pool waits for a source's offer.

        Raises:
            BatonError: `error`, if it is not retryable.
        """
        if not may_retry(error):
            raise error
        self.local_prefill_requested = self._is_destination_due = False
        self._close_stream()

    def offer(self, source: transfer_pb2.SourceTerms) -> None:
        """Reserve for the handoff of this prefill worker, or move the reservation to it.

        Raises:
            PeerLostError: the booked pool has restarted since, perhaps with another configuration.
        """
        self._source = source
        if self.stream is not None:
            self.stream.send(decode_pb2.DecodeInput(new_source=source))
            self._expect_destination()
        elif self._search is None or self._search.done():
            if self._booking.is_outlived:
                raise PeerLostError("the decode worker restarted while the request was queued")
            self._open(source)

    def source_lost(self) -> None:
        """Record that the prefill worker is lost; its replacement makes a new offer.

        The pool is notified, so that it waits for the replacement. A pool that may still refuse is
        notified after it has reserved.
        """
        self._source = None
        if self.has_reserved:
            self._send_source_lost()
        if not self._is_destination_due:
            self._due.settle()

    def first_token(self, token: types_pb2.TokenChunk) -> None:
        """Send the first token once the pool has reserved; only the first call counts.

        A message to a pool that refuses would hide the reason of the refusal.
        """
        if self._first_token is not None:
            return
        self._first_token = token
        if self.has_reserved:
            self._send_first_token(token)

    def reserved(self, destination: transfer_pb2.DestinationTerms) -> bool:
        """Record destination terms; return whether they fit the current source.

        They do not if they reply to an offer that was overtaken, or if their source is lost. A
        replacement that still queues gets terms of its own when it has started.
        """
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
        """Expect the pool's commit within `limits.commit_s`."""
        self._due.owe(self._parts.limits.commit_s)

    @property
    def lacks_first_token(self) -> bool:
        """Return whether the due commit is impossible because no worker sent the first token."""
        return not self._is_destination_due and self._first_token is None

    def committed(self) -> None:
        self._due.settle()

    def finished(self) -> None:
        """Let the stream end by itself: the pool has generated every token."""
        if self.stream is not None:
            self.stream.let_end()

    @property
    def is_overdue(self) -> bool:
        """Return whether a reply of the pool is overdue."""
        return self._due.is_over

    def overdue(self) -> BatonError:
        """Return the error for a pool whose reply is overdue."""
        missing = "commit a handoff that was sent" if self.has_reserved else "answer a reservation"
        return PeerLostError(f"the decode worker did not {missing} in time")

    def move_on(self, error: BatonError) -> None:
        """Offer the request to the next pool. When all have refused, offer it again until one
        accepts or the time is up.

        Raises:
            BatonError: `error`, if no other pool can help.
        """
        if not may_retry(error):
            raise error
        self._close_stream()
        suspect(self._booking, error)
        self._tried |= {self.address}
        # The prompt's source needs a pool that fits it. That is stricter than fitting the previous
        # pool.
        wanted = self.compatibility if self._source is None else self._source.compatibility
        self._search = self._parts.group.create_task(self._reopen(error, wanted))

    def broken(self, reason: str) -> None:
        """Treat the request as lost on this pool after a malformed event."""
        if self.stream is not None:
            self.stream.close()
            self._parts.deliver(Ended(self.stream, lost=reason))

    def close(self) -> None:
        """Close the stream, stop a search and release the booking. Idempotent."""
        _cancel(self._search)
        self._close_stream()
        self._booking.release()

    def _close_stream(self) -> None:
        self._due.close()
        if self.stream is not None:
            self.stream.close()
        self.stream = None

    async def _reopen(self, error: BatonError, compatibility: str) -> None:
        """Book another pool and open a stream to it.

        The old booking is kept until then: a request that waits here goes before those in
        admission.
        """
        directory = self._parts.directory
        prompt = self._parts.prompt
        book = partial(
            directory.book_decode, prompt, compatibility, context_tokens=self._parts.context_tokens
        )
        booking = book(tried=self._tried)
        if booking is None:
            timeout_s = self._search_deadline(error, compatibility).remaining_s()
            if timeout_s <= 0:
                raise error
            await self._pause()
            self._tried = frozenset()
            booking = await search(directory, lambda: book(tried=frozenset()), timeout_s, error)
        self._booking.release()
        self._booking = booking
        if self._source is not None:
            self._open(self._source)

    async def _pause(self) -> None:
        """Wait until the pools may have changed."""
        await asyncio.sleep(RETRY_PAUSE_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(MAX_RETRY_PAUSE_S):
                await self._parts.directory.changed()

    def _open(self, source: transfer_pb2.SourceTerms | None) -> None:
        worker = self._booking.worker
        opening = decode_pb2.DecodeInput()
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

    def _search_deadline(self, error: BatonError, compatibility: str) -> Deadline:
        """Return the end of the search for another pool, counted from the first refusal; later if
        pools are alive and only full.
        """
        clock = LoopClock()
        if self._refused_since_s is None:
            self._refused_since_s = clock.now()
        is_full = isinstance(error, CapacityError) and self._parts.directory.has_decode(
            compatibility, self._parts.context_tokens
        )
        limits = self._parts.limits
        timeout_s = (
            limits.capacity_wait_s if is_full else limits.restart_estimate_s(self._parts.directory)
        )
        return Deadline(clock, self._refused_since_s + timeout_s)

    def _expect_destination(self) -> None:
        self._num_offers += 1
        self._is_destination_due = True
        self._due.owe(self._parts.limits.reserve_s)


def _cancel(task: asyncio.Task[None] | None) -> None:
    """Cancel a search, unless the caller is that search."""
    if task is not None and task is not asyncio.current_task():
        task.cancel()
