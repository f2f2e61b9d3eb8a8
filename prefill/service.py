"""The Prefill service: runs a router's requests (`pool.request.router_call`) from the queue until
the decode pool has their bytes.

open ─▶ queued ─▶ started (source terms) … chunks run … ─▶ first_token
     destination (whenever decode has reserved) ─▶ layers leave as they complete ─▶ sent
     release: decode has committed ─▶ pages freed, ended
"""

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

import grpc

from engine.core.request import Request
from pool.request.conversion import chunk_to_proto, scores_to_proto
from pool.request.entry import DataRanks, Failed
from pool.request.handler import Brought, RequestParts, read_request, serve
from pool.request.router_call import Opening, RequestKind, RouterCall
from pool.request.streams import Inbox, SessionChanged
from prefill.event_sender import PrefillEventSender
from prefill.prompts import FirstToken, PrefillEntryEvent, Scored, Started
from prefill.scheduler import PrefillScheduler
from protos import prefill_pb2 as pb
from protos import prefill_pb2_grpc, transfer_pb2
from runtime.clock import Deadline, SystemClock
from runtime.digests import prompt_digest
from runtime.errors import (
    BatonError,
    DeadlineError,
    FieldViolation,
    HandoffError,
    IncompatiblePeerError,
    InternalError,
    InvalidRequestError,
    RequestAborted,
    UnavailableError,
)
from runtime.observe.tracing import Span, begin
from runtime.rpc.calls import CallTracker
from transfer.plan import codec
from transfer.plan.copy_plan import check_plan
from transfer.plan.handoff_terms import DestinationTerms, SourceTerms
from transfer.session import SendSession
from transfer.session_states import SendState

DESTINATION_TIMEOUT_S = 120.0  # seconds from the first token to the destination terms
UNREAD_TIMEOUT_S = 120.0  # total seconds that the scores of a prompt may wait to be read

# Texts for the states of a session that time out.
_WAITS = {
    SendState.PLANNED: "every stage to be ready to send",
    SendState.SENDING: "every byte to leave",
    SendState.SENT: "the router to confirm the handoff",
}

PrefillInbox = Inbox[pb.PrefillInput, PrefillEntryEvent]


@dataclass(frozen=True, kw_only=True)
class PrefillParts(RequestParts):
    """The components that a request on this pool uses."""

    ranks: DataRanks[PrefillScheduler]
    chunk_tokens: int
    may_decode: bool = False  # whether the pool also decodes


class PrefillHandler:
    """One request on this pool with its session and its memory.

    Implements `pool.request.handler.RequestHandler`.
    """

    def __init__(
        self,
        parts: PrefillParts,
        inbox: PrefillInbox,
        event_sender: PrefillEventSender,
        request: Request,
        key: int,
        brought: Brought,
    ) -> None:
        self._parts = parts
        self._brought = brought
        self._inbox = inbox
        self._event_sender = event_sender
        self._request = request
        self._key = key
        self._source: SourceTerms | None = None
        self._data_rank = 0  # set when it has started
        self._session: SendSession | None = None
        self._has_first_token = False
        self._is_released = False
        self._opened_s = 0.0
        self._has_reported_sent = False
        self._destination: DestinationTerms | None = None
        self._is_in_place = False  # this pool decodes the request, too
        self._has_shaken_hands = False
        self._waiting = begin("baton.prefill.queue", request_id=request.request_id)
        self._computing: Span | None = None
        self._sending: Span | None = None

    async def run(self) -> None:
        while not self._is_released:
            match await self._inbox.get(*self._next_timeout()):
                case Started() as started:
                    self._event_sender.started(self._started(started))
                case Scored(first_position, tokens):
                    self._event_sender.scored(scores_to_proto(first_position, tokens))
                case FirstToken() as event:
                    self._event_sender.first_token(self._first_token(event))
                    self._leave_in_place()
                case Failed(error):
                    raise error.again()
                case SessionChanged():
                    if (sent := self._sent()) is not None:
                        self._event_sender.sent(sent)
                case pb.PrefillInput() as message:
                    self._handle_input(message)
                case other:
                    raise InternalError(f"unexpected {type(other).__name__} of a prompt")

    def _handle_input(self, message: pb.PrefillInput) -> None:
        match message.WhichOneof("input"):
            case "destination":
                self._send_to(message.destination)
            case "release":
                self._released()
            case "scores_read":
                self._event_sender.scores_read(message.scores_read)
            case other:
                raise InvalidRequestError(FieldViolation("input", f"{other} is not expected now"))

    def _next_timeout(self) -> tuple[float | None, str, type[BatonError]]:
        """Return how long the next input may take, its name, and the error to raise on timeout.

        Before the first token and without a session there is no limit (None), because queueing and
        computing last as long as the request. The error lets the router try another worker, unless
        the client causes the delay.
        """
        if self._event_sender.is_stalled:
            return (
                UNREAD_TIMEOUT_S - self._event_sender.stalled_s,
                "the client to read the prompt's logprobs",
                DeadlineError,
            )
        if self._session is not None:
            return (
                self._session.remaining_s(),
                _WAITS.get(self._session.state, "the session to end"),
                HandoffError,
            )
        return (
            DESTINATION_TIMEOUT_S if self._has_first_token else None,
            "the destination terms",
            HandoffError,
        )

    def _released(self) -> None:
        """Note that decode has committed and release the session.

        Raises:
            RequestAborted: the router released the prompt before the first token.
        """
        if not self._has_first_token:
            raise RequestAborted("the router released the prompt before the first token")
        self._is_released = True
        if self._session is not None and self._session.state is SendState.SENT:
            self._session.release()

    def _sent(self) -> pb.PrefillSent | None:
        """Return the event to send once every byte has left, or None.

        Raises:
            BatonError: the sending failed.
        """
        session = self._session
        if session is None:
            return None
        self._note_handshake(session)
        if session.error is not None:
            self._parts.meters.handoff.failures.labels(session.error.reason.lower()).inc()
            raise session.error
        if session.state is not SendState.SENT or self._has_reported_sent:
            return None
        self._has_reported_sent = True
        self._end_sending(session)
        assert self._destination is not None
        self._parts.meters.on_handoff(
            len(self._request.prompt_token_ids),
            time.monotonic() - self._opened_s,
            held_tokens=self._destination.held_tokens,
            with_draft=self._destination.with_draft,
        )
        return pb.PrefillSent(num_bytes=session.num_bytes)

    def _leave_in_place(self) -> None:
        """Report the prompt as sent once it is computed, if it stays in this pool."""
        if self._is_in_place and self._has_first_token:
            self._event_sender.sent(pb.PrefillSent())

    def _end_sending(self, session: SendSession) -> None:
        """End the sending span once every byte has left.

        It gets one record per chunk, with the times that the leader's own stage measured.
        """
        if self._sending is None:
            return
        for part in session.chunk_timings:
            self._sending.record(
                "baton.transfer.chunk",
                part.released_s,
                part.left_s,
                num_tokens=part.num_tokens,
                request_id=self._request.request_id,
                num_bytes=part.num_bytes,
            )
        self._sending.end()

    @staticmethod
    def _end_spans(*spans: Span | None) -> None:
        for span in spans:
            if span is not None:
                span.end()

    def _note_handshake(self, session: SendSession) -> None:
        """Record once how long the handshake of all stages took, or why it failed."""
        if self._has_shaken_hands or session.state is SendState.PLANNED:
            return
        self._has_shaken_hands = True
        if session.error is not None:
            self._parts.meters.handshake_failed(session.error)
        else:
            self._parts.meters.handoff.handshake_s.observe(time.monotonic() - self._opened_s)

    def end(self) -> None:
        """Close open resources and release the memory once nothing can read it."""
        self._end_spans(self._waiting, self._computing, self._sending)
        key, session = self._key, self._session
        session_id = None if session is None else session.session_id
        if session is not None:
            session.abort("its request ended")  # no effect if everything was sent and released
        self._parts.reclaimer.end(
            lambda: self._parts.ranks.of(key).release(key),
            session=session,
            close=lambda: self._parts.leader.group.close_request(key, session_id),
        )

    def _started(self, started: Started) -> pb.PrefillStarted:
        parts = self._parts
        parts.meters.work.queue_s.observe(started.queue_s)
        self._waiting.end()
        self._computing = begin("baton.prefill.compute", request_id=self._request.request_id)
        mine, self._data_rank = parts.leader.compatibility, started.data_rank
        self._source = SourceTerms(
            compatibility=mine.digest,
            compatibility_text=mine.text,
            page_size=parts.plan.geometry.page_size,
            num_tokens=len(self._request.prompt_token_ids),
            chunk_tokens=parts.chunk_tokens,
            page_ids=started.page_ids,
            slot_id=started.slot_id,
            stages=parts.leader.group.endpoints(started.data_rank),
            sends_rest=True,
            request_key=self._key if parts.may_decode else 0,
            content=prompt_digest(self._request.prompt_token_ids, self._request.adapter),
        )
        return pb.PrefillStarted(
            terms=codec.source_to_proto(self._source),
            queue_s=started.queue_s,
            cached_tokens=started.num_cached,
            **self._brought.counts(started.num_cached),
        )

    def _first_token(self, event: FirstToken) -> pb.PrefillFirstToken:
        self._has_first_token = True
        if self._session is not None:
            self._session.computed()
        self._end_spans(self._computing)
        return pb.PrefillFirstToken(token=chunk_to_proto(event.token), prefill_s=event.prefill_s)

    def _send_to(self, message: transfer_pb2.DestinationTerms) -> None:
        """Start sending to the decode pool, beginning with the layers already computed.

        Raises:
            UnavailableError: a stage was lost after the prompt had started.
        """
        if self._source is None or self._session is not None or self._is_in_place:
            raise InvalidRequestError(
                FieldViolation("input", "expected one destination, after started")
            )
        if self._parts.leader.group.endpoints(self._data_rank) != self._source.stages:
            # The engine also reports this loss, but a forward may delay its report for longer than
            # the destination terms take.
            raise UnavailableError(
                "a stage of the prefill pool was lost after this prompt had started"
            )
        if message.in_place:
            if not self._parts.may_decode:
                raise IncompatiblePeerError("destination.in_place: this pool does not decode")
            self._is_in_place = True
            self._leave_in_place()
            return
        destination = codec.destination_from_proto(message)
        session = SendSession(
            destination.session_id,
            epoch=destination.epoch,
            clock=SystemClock(),
            num_stages=self._parts.leader.group.session_size,
        )
        if self._has_first_token:
            session.computed()
        try:
            check_plan(self._source, destination, self._parts.plan.geometry.specs)
            self._parts.leader.group.open_send(
                self._key,
                self._source,
                destination,
                session,
                self._inbox.session_changed,
                self._data_rank,
            )
        except BatonError as error:
            self._parts.meters.handshake_failed(error)
            raise
        self._destination, self._session = destination, session
        self._opened_s = time.monotonic()
        self._sending = begin(
            "baton.transfer.send",
            request_id=self._request.request_id,
            session_id=destination.session_id,
            epoch=destination.epoch,
        )


PrefillContext = grpc.aio.ServicerContext[pb.PrefillInputs, pb.PrefillEvents]


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    """The gRPC servicer of the Prefill service.

    The scheduler makes every decision, and the transfer agents move every byte.
    """

    def __init__(self, parts: PrefillParts, calls: CallTracker) -> None:
        """Create the servicer; `calls` tracks the calls of its server."""
        self._parts = parts
        self._calls = calls
        self._kind: RequestKind[pb.PrefillInput, pb.PrefillEvent] = RequestKind(
            "/baton.v1.Prefill/Run",
            self._run,
            lambda item: item.open.context,
            lambda key, ended: pb.PrefillEvent(key=key, ended=ended),
        )

    async def Serve(
        self, request_iterator: AsyncIterator[pb.PrefillInputs], context: PrefillContext
    ) -> AsyncIterator[pb.PrefillEvents]:
        num_taken = sum(
            scheduler.limits.max_running + scheduler.limits.max_queued
            for scheduler in self._parts.ranks.schedulers
        )
        call = RouterCall(
            self._kind, self._calls, self._parts.meters.handoff.leases_expired, num_taken
        )
        async with aclosing(
            call.events(message.inputs async for message in request_iterator)
        ) as batches:
            async for events in batches:
                yield pb.PrefillEvents(events=events)

    async def _run(self, opening: Opening[pb.PrefillInput, pb.PrefillEvent]) -> None:
        parts = self._parts
        asked = opening.input.open
        request = read_request(parts, asked.request, role="prefill")
        inbox: PrefillInbox = opening.inbox
        emit = partial(parts.post.put, inbox.happened)
        deadline = Deadline.after(parts.ranks.schedulers[0].clock, opening.timeout_s)

        async def take_place() -> PrefillHandler:
            blocks = parts.blocks_of(request, parts.leader.compatibility.digest)
            brought = await parts.bring(request, blocks, asked.holder)

            def submit(scheduler: PrefillScheduler) -> int:
                return scheduler.submit(request, emit, blocks=blocks, deadline=deadline)

            key = await parts.leader.loop.submit(
                lambda: parts.ranks.place(request, blocks, submit, brought.data_rank),
                undo=lambda taken: parts.ranks.of(taken).release(taken),
            )
            return PrefillHandler(
                parts, inbox, PrefillEventSender(opening.event_sender), request, key, brought
            )

        await serve(parts, request, take_place)
