"""A request on one pair of workers: their messages and failures, until the pair ends. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from protos import decode_pb2, generation_pb2, prefill_pb2, transfer_pb2, types_pb2
from router.request.events import (
    BookedWorker,
    CheckLink,
    Emit,
    EmitScores,
    End,
    LinkChecked,
    Milestone,
    Note,
    NoteRetry,
    Outbox,
    PairPlaced,
    Received,
    ReplyOverdue,
    RequestEvent,
    SearchFailed,
    StreamEnded,
    WorkerFound,
)
from router.request.reservation import RequestReservation
from router.request.retries import FlowLimits
from router.request.source import RequestSource
from router.request.transitions import (
    IllegalEventError,
    PoolState,
    PoolStep,
    SourceState,
    SourceStep,
)
from router.workers.worker import WorkerRole
from runtime.errors import (
    BatonError,
    FieldViolation,
    HandoffError,
    IncompatiblePeerError,
    InternalError,
    InvalidRequestError,
    PeerLostError,
)
from runtime.rpc.message_bounds import MAX_STAGES, MAX_TERMS_BYTES

PrefillEvent = prefill_pb2.PrefillEvent
DecodeEvent = decode_pb2.DecodeEvent


@dataclass(slots=True)
class ResponseProgress:
    """The output that the client has; it outlives a pair.

    `is_resumed`: another router began the response.
    """

    token_ids: list[int] = field(default_factory=list)
    first_token: types_pb2.TokenChunk | None = None
    is_resumed: bool = False


@dataclass(frozen=True, slots=True)
class PoolLost:
    """The end of a pair: the pool that held the state is lost, or gave the request up.

    `retry_reason` labels the retry.
    """

    pool: BookedWorker
    error: BatonError
    retry_reason: str


@dataclass(frozen=True, slots=True)
class Joined:
    """The pool has the whole prompt."""


PairOutcome = PoolLost | Joined | End | None


class RequestPair:
    """A request on one pair of workers.

    Handlers return an outcome if the request has reached one, and raise the BatonError that
    ends the request.
    """

    def __init__(
        self, placed: PairPlaced, progress: ResponseProgress, limits: FlowLimits, out: Outbox
    ) -> None:
        self.source = RequestSource(placed.source, limits.prefill_attempts, out)
        self.pool = RequestReservation(placed.pool, progress.token_ids[1:], limits, out)
        self._may_compute_rest = placed.may_compute_rest
        self._progress = progress
        self._out = out

    def start(self, now_s: float) -> None:
        """Open a stream to the prefill worker, or to a pool that may compute the rest alone."""
        self._note(Milestone.PLACED)
        if self._may_compute_rest and self._progress.first_token is None:
            self.pool.ask(now_s)
        else:
            self.source.open()

    def close(self) -> None:
        """Close both streams and release both bookings. Idempotent."""
        self.source.close()
        self.pool.close()

    def give_up(self) -> None:
        """Close the pair, because the request moves to another one."""
        self._note(Milestone.MOVED)
        self.close()

    def received(self, event: Received, now_s: float) -> PairOutcome:
        """Handle a message; drop it if its stream was closed."""
        number, message = event
        if number == self.pool.number and isinstance(message, DecodeEvent):
            handlers = self._DECODE_HANDLERS
        elif number == self.source.number and isinstance(message, PrefillEvent):
            handlers = self._PREFILL_HANDLERS
        else:
            return None
        kind = message.WhichOneof("event")
        if kind not in handlers:
            raise IllegalEventError(f"a worker sent an event of kind {kind}")
        return handlers[kind](self, message, now_s)

    # Messages of the prefill worker.

    def _started(self, message: PrefillEvent, now_s: float) -> None:
        _check_size(message.started.terms)
        self.source.move(SourceStep.STARTED)
        self._note(Milestone.STARTED, message)
        self.pool.offer(message.started.terms, now_s)

    def _scored(self, message: PrefillEvent, _: float) -> None:
        self.source.move(SourceStep.SCORED)
        self._out.append(EmitScores(self.source.number, message.scored))

    def _computed(self, message: PrefillEvent, _: float) -> None:
        token = message.first_token.token
        if len(token.token_ids) != 1:
            raise IllegalEventError(f"a worker sent {len(token.token_ids)} tokens as the first one")
        self.source.computed()
        self._note(Milestone.COMPUTED, message)
        if self._progress.first_token is None:
            self._progress.first_token = token
            self._emit(token, is_decoded=False)
        elif token.token_ids != self._progress.first_token.token_ids:
            raise self._other_first_token(token, self._progress.first_token)
        self.pool.first_token(token)

    def _other_first_token(
        self, token: types_pb2.TokenChunk, known: types_pb2.TokenChunk
    ) -> BatonError:
        """Return the error of a first token that differs from the one that the client has."""
        if self._progress.is_resumed:
            return InvalidRequestError(
                FieldViolation(
                    "resumed",
                    f"begins with {list(known.token_ids)}, the response to this request with "
                    f"{list(token.token_ids)}",
                )
            )
        return InternalError(
            f"a second prefill worker sampled {list(token.token_ids)} as first token, the first one "
            f"{list(known.token_ids)}"
        )

    def _sent(self, _: PrefillEvent, now_s: float) -> None:
        self.source.sent()
        self.pool.expect_commit(now_s)

    # Messages of the decode pool.

    def _destination(self, message: DecodeEvent, _: float) -> None:
        _check_size(message.destination)
        is_current = self.pool.reserved(message.destination)
        self._note(Milestone.RESERVED)
        if is_current:
            self._note(Milestone.DESTINATION)
            self.source.deliver_to(message.destination)

    def _committed(self, message: DecodeEvent, _: float) -> PairOutcome:
        self._check_position(message)
        if self._progress.first_token is None:
            raise IllegalEventError("a pool committed before any worker sampled a first token")
        self.pool.committed()
        self._note(Milestone.COMMITTED, message)
        self.source.joined()
        return Joined()

    def _computes_rest(self, message: DecodeEvent, _: float) -> PairOutcome:
        self._check_position(message)
        self.pool.computes_rest()
        if self.pool.worker.address != self.source.worker.address:
            self.source.close()  # otherwise the prompt queues where it is booked
        self._note(Milestone.LOCAL, message)
        return Joined()

    def _decoded(self, message: DecodeEvent, _: float) -> None:
        self._check_position(message)
        self.pool.move(PoolStep.TOKENS)
        tokens = message.tokens
        if self._progress.first_token is None:  # the pool prefilled the prompt locally
            if self.source.state is SourceState.BOOKED:
                self.source.computed_in_place()
            self._progress.first_token = types_pb2.TokenChunk(token_ids=tokens.token_ids[:1])
        self._emit(tokens, is_decoded=True)

    def _finished(self, message: DecodeEvent, _: float) -> PairOutcome:
        self._check_position(message)
        self.pool.finished()
        self._note(Milestone.FINISHED, message)
        finished = message.finished
        stop_token_id = finished.stop_token_id if finished.HasField("stop_token_id") else None
        return End(
            generation_pb2.GenerateFinish(reason=finished.reason, stop_token_id=stop_token_id)
        )

    def _check_position(self, message: DecodeEvent) -> None:
        """Check that no tokens were lost or repeated.

        Raises:
            IllegalEventError: the message does not continue what the client has.
        """
        num_tokens = len(self._progress.token_ids)
        if message.position != num_tokens:
            raise IllegalEventError(
                f"its next token is number {message.position}, the client has {num_tokens}"
            )

    # Failures.

    def stream_ended(self, event: StreamEnded, now_s: float) -> PairOutcome:
        """Handle the end of a stream: replace the worker, or give the pair up."""
        if event.number == self.source.number:
            if self.source.state is not SourceState.RELEASED:
                early = PeerLostError("the prefill worker ended its stream too early")
                self._source_failed(event.error or early)
        elif event.number == self.pool.number:
            early = PeerLostError("the decode worker ended its stream too early")
            return self._pool_failed(event.error or early, now_s)
        return None

    def reply_overdue(self, _: ReplyOverdue, now_s: float) -> PairOutcome:
        """Handle the absence of a reply that the pool owes."""
        if self.pool.due is None:
            return None
        if self.pool.lacks_first_token:
            error = PeerLostError(
                "the prefill worker sent a handoff and did not send the first token in time"
            )
            self._source_failed(error)
            return None
        return self._pool_failed(self.pool.overdue(), now_s)

    def link_checked(self, event: LinkChecked, _: float) -> PairOutcome:
        """Replace the prefill worker if the pool has another source, else give the pair up."""
        error = self.source.error
        if event.number != self.source.number or error is None:
            return None
        if not event.is_fed:
            return PoolLost(self.pool.worker, PeerLostError(str(error)), error.reason)
        self._replace_source(error)
        return None

    def found(self, event: WorkerFound, now_s: float) -> None:
        """Continue on a worker that a search has booked; release one that comes too late."""
        if event.number == self.source.number:
            self.source.found(event.worker)
        elif event.number == self.pool.number:
            self.pool.found(event.worker, now_s, has_started_over=event.has_started_over)
        else:
            self._out.release(event.worker)

    def search_failed(self, event: SearchFailed, _: float) -> None:
        """Raise the error that made the search necessary.

        Raises:
            BatonError: it.
        """
        for half in (self.source, self.pool):
            if event.number == half.number and half.error is not None:
                raise half.error

    def _source_failed(self, error: BatonError) -> None:
        self.pool.lose_source()
        if isinstance(error, HandoffError | IncompatiblePeerError):
            number = self.source.lose_link(error)
            self._out.append(CheckLink(number, self.source.worker, self.pool.worker))
        else:
            self._replace_source(error)

    def _replace_source(self, error: BatonError) -> None:
        self.source.fail(error, self.pool.worker)
        self._out.append(NoteRetry(WorkerRole.PREFILL, error.reason, str(error)))

    def _pool_failed(self, error: BatonError, now_s: float) -> PairOutcome:
        if self.pool.is_held:
            # Wrong terms of a replacement are no reason to end the request.
            has_declined = isinstance(error, IncompatiblePeerError)
            lost = PeerLostError(str(error)) if has_declined else error
            return PoolLost(self.pool.worker, lost, error.reason)
        if self.pool.state is PoolState.ASKED:
            self.pool.declined(error)
            self.source.open()
        elif isinstance(error, IncompatiblePeerError):
            # Pairs have equal digests, so that the terms are wrong: another pool cannot take them.
            self.pool.declined(error)
            if self.pool.has_source:
                self._source_failed(error)
        else:
            self.pool.refused(error, now_s)
            self._out.append(NoteRetry(WorkerRole.DECODE, error.reason, str(error)))
        return None

    def _emit(self, tokens: types_pb2.TokenChunk, *, is_decoded: bool) -> None:
        self._progress.token_ids.extend(tokens.token_ids)
        self._out.append(Emit(tokens, is_decoded))

    def _note(
        self, milestone: Milestone, message: PrefillEvent | DecodeEvent | None = None
    ) -> None:
        self._out.append(Note(milestone, self.source.worker, self.pool.worker, message))

    HANDLERS: ClassVar[Mapping[type[RequestEvent], Callable[[Any, Any, float], PairOutcome]]] = {
        Received: received,
        StreamEnded: stream_ended,
        ReplyOverdue: reply_overdue,
        LinkChecked: link_checked,
        WorkerFound: found,
        SearchFailed: search_failed,
    }
    _PREFILL_HANDLERS: ClassVar[Mapping[str | None, Callable[[Any, Any, float], PairOutcome]]] = {
        "started": _started,
        "scored": _scored,
        "first_token": _computed,
        "sent": _sent,
    }
    _DECODE_HANDLERS: ClassVar[Mapping[str | None, Callable[[Any, Any, float], PairOutcome]]] = {
        "destination": _destination,
        "committed": _committed,
        "local": _computes_rest,
        "tokens": _decoded,
        "finished": _finished,
    }


def _check_size(terms: transfer_pb2.SourceTerms | transfer_pb2.DestinationTerms) -> None:
    """Check that the call to the other worker can carry these terms.

    That call carries those of all requests, and ends if one of its messages is too large.

    Raises:
        IllegalEventError: it cannot.
    """
    size, num_stages = terms.ByteSize(), len(terms.stages)
    if size > MAX_TERMS_BYTES or num_stages > MAX_STAGES:
        raise IllegalEventError(
            f"a worker sent terms of {size} bytes with {num_stages} stages; at most "
            f"{MAX_TERMS_BYTES} and {MAX_STAGES}"
        )
