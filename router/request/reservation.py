"""The decode of a request: the reservation, offered to pool after pool, and what follows. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from protos import decode_pb2, transfer_pb2, types_pb2
from router.request.events import (
    BookedWorker,
    Close,
    MarkLost,
    OpenDecode,
    Outbox,
    Release,
    SearchDecode,
    Send,
)
from router.request.retries import FlowLimits, is_suspect, may_retry
from router.request.transitions import (
    POOL_TRANSITIONS,
    IllegalEventError,
    PoolState,
    PoolStep,
    Stateful,
)
from runtime.errors import BatonError, CapacityError, PeerLostError


@dataclass(frozen=True, slots=True)
class DueReply:
    """A reply that the pool owes by `at_s`: destination terms, otherwise a commit."""

    at_s: float
    is_destination: bool


class RequestReservation(Stateful[PoolState, PoolStep]):
    """A request on a booked decode pool, and on others when it refuses."""

    def __init__(
        self, worker: BookedWorker, replayed: Sequence[int], limits: FlowLimits, out: Outbox
    ) -> None:
        """`replayed`: output tokens after the first that the client already has."""
        super().__init__(POOL_TRANSITIONS, PoolState.BOOKED)
        self.worker = worker
        self.number = 0  # of the stream or the search; 0 without
        self.due: DueReply | None = None
        self.error: BatonError | None = None  # of the latest refusal
        self._replayed = tuple(replayed)
        self._limits = limits
        self._out = out
        self._source: transfer_pb2.SourceTerms | None = None
        self._first_token: types_pb2.TokenChunk | None = None
        # Counts offers on the current stream. Destination terms carry the epoch of their offer.
        self._num_offers = 0
        self._epoch = -1  # of the latest destination terms on the current stream
        self._tried: frozenset[str] = frozenset()
        self._refused_since_s: float | None = None

    @property
    def is_held(self) -> bool:
        """Return whether the pool holds memory for the request."""
        return self.state in {PoolState.RESERVED, PoolState.DECODING}

    @property
    def has_source(self) -> bool:
        """Return whether a prefill worker has started the prompt and is not lost."""
        return self._source is not None

    def ask(self, now_s: float) -> None:
        """Ask the pool to compute the part of the prompt that it lacks; it may decline."""
        self.move(PoolStep.ASK)
        self._open(now_s)

    def declined(self, error: BatonError) -> None:
        """Wait for a source: the pool neither computes the rest of the prompt nor takes its offer.

        A first token of a source with wrong terms may be wrong, too. The pool gets that of the next
        source, once it is known to equal what the client has.

        Raises:
            BatonError: `error`, if it is not retryable.
        """
        self.move(PoolStep.DECLINE)
        self._leave()
        self._first_token = None
        if not may_retry(error):
            raise error

    def computes_rest(self) -> None:
        """Record that the pool computes the rest of the prompt itself."""
        self.move(PoolStep.LOCAL)
        self.due = None

    def offer(self, source: transfer_pb2.SourceTerms, now_s: float) -> None:
        """Reserve for the handoff of this prefill worker, or move the reservation to it."""
        self._source = source
        if self.state is PoolState.BOOKED:
            self.move(PoolStep.OPEN)
            self._open(now_s)
        elif self.state in {PoolState.OFFERED, PoolState.RESERVED}:
            self._send(decode_pb2.DecodeInput(new_source=source))
            self._expect_destination(now_s)

    def lose_source(self) -> None:
        """Record that the prefill worker is lost; its replacement makes a new offer.

        The pool is notified, so that it waits for the replacement. A pool that may still refuse is
        notified after it has reserved.
        """
        self._source = None
        if self.state is PoolState.RESERVED:
            self._send_source_lost()
        if self.due is not None and not self.due.is_destination:
            self.due = None

    def first_token(self, token: types_pb2.TokenChunk) -> None:
        """Send the first token once the pool has reserved; only the first call counts.

        A message to a pool that refuses would hide the reason of the refusal.
        """
        if self._first_token is None:
            self._first_token = token
            if self.state is PoolState.RESERVED:
                self._send(decode_pb2.DecodeInput(first_token=token))

    def reserved(self, destination: transfer_pb2.DestinationTerms) -> bool:
        """Record destination terms; return whether they fit the current source.

        They do not if they reply to an offer that was overtaken, or if their source is lost. A
        replacement that still queues gets terms of its own when it has started.

        Raises:
            IllegalEventError: the terms are of no offer, or not newer than the latest ones.
        """
        if not self._epoch < destination.epoch < self._num_offers:
            raise IllegalEventError(f"a pool sent destination terms of epoch {destination.epoch}")
        is_first = self.state is PoolState.OFFERED
        self.move(PoolStep.DESTINATION)
        self._epoch = destination.epoch
        if is_first and self._first_token is not None:
            self._send(decode_pb2.DecodeInput(first_token=self._first_token))
        if is_first and self._source is None:
            self._send_source_lost()
        if destination.epoch != self._num_offers - 1:
            return False
        self.due = None
        return self._source is not None

    def expect_commit(self, now_s: float) -> None:
        """Expect the pool's commit: its source has sent every byte."""
        if self.state is not PoolState.DECODING:
            self.due = DueReply(now_s + self._limits.commit_s, is_destination=False)

    def committed(self) -> None:
        """Record that the pool has the whole prompt."""
        self.move(PoolStep.COMMITTED)
        self.due = None

    @property
    def lacks_first_token(self) -> bool:
        """Return whether the due commit is impossible because no worker sent the first token."""
        return self.due is not None and not self.due.is_destination and self._first_token is None

    def overdue(self) -> PeerLostError:
        """Return the error of a pool whose reply is overdue."""
        missing = "commit a handoff that was sent" if self.is_held else "answer a reservation"
        return PeerLostError(f"the decode worker did not {missing} in time")

    def refused(self, error: BatonError, now_s: float) -> None:
        """Search for another pool.

        Raises:
            BatonError: `error`, if no other pool can help.
        """
        self.move(PoolStep.REFUSE)
        self.error = error
        self._leave()
        if not may_retry(error):
            raise error
        if is_suspect(error):
            self._out.append(MarkLost(self.worker, str(error)))
        self._tried |= {self.worker.address}
        if self._refused_since_s is None:
            self._refused_since_s = now_s
        # The prompt's source needs a pool that fits it. That is stricter than fitting the previous
        # pool.
        wanted = self.worker if self._source is None else self._source
        self.number = self._out.number()
        self._out.append(
            SearchDecode(
                self.number,
                wanted.compatibility,
                self._tried,
                self._refused_since_s,
                isinstance(error, CapacityError),
            )
        )

    def found(self, worker: BookedWorker, now_s: float, *, has_started_over: bool) -> None:
        """Offer the source to the pool that a search has booked."""
        self.move(PoolStep.FOUND)
        self.number = 0
        # Kept until now: a request that searches goes before those in admission.
        self._out.append(Release(self.worker))
        self.worker = worker
        if has_started_over:
            self._tried = frozenset()
        if self._source is not None:
            self.offer(self._source, now_s)

    def finished(self) -> None:
        """Record that the pool has generated every token: it ends the stream by itself."""
        self.move(PoolStep.FINISHED)
        self._out.append(Close(self.number, is_ending=True))
        self.number = 0

    def close(self) -> None:
        """Close the stream or the search, and release the booking. Idempotent."""
        if self.state is not PoolState.CLOSED:
            self.move(PoolStep.CLOSE)
            self._leave()
            self._out.append(Release(self.worker))

    def _open(self, now_s: float) -> None:
        self.number = self._out.number()
        self._out.append(OpenDecode(self.number, self.worker, self._source, self._replayed))
        self._num_offers = 0
        self._epoch = -1
        self._expect_destination(now_s)

    def _leave(self) -> None:
        self.due = None
        if self.number:
            self._out.append(Close(self.number))
            self.number = 0

    def _expect_destination(self, now_s: float) -> None:
        self._num_offers += 1
        self.due = DueReply(now_s + self._limits.reserve_s, is_destination=True)

    def _send(self, message: decode_pb2.DecodeInput) -> None:
        self._out.append(Send(self.number, message))

    def _send_source_lost(self) -> None:
        self._send(decode_pb2.DecodeInput(source_lost=decode_pb2.DecodeSourceLost()))
