"""The Decode service: runs a router's requests (`pool.request.router_call`), each from its
reservation to its last token.

open ─▶ reserve on all stages, post receives ─▶ destination ─▶ … bytes land, digests match …
    first_token ───────────────────────────────▶ committed ─▶ tokens … ─▶ finished, ended
    source_lost (a prefill worker failed), new_source ─▶ destination of the next epoch, same memory
open without a source ─▶ local (nearly all of the prompt is cached) ─▶ tokens …; else rejected
open with replayed tokens (another pool was lost) ─▶ the same; they are computed again before a new
token is sampled
"""

import math
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

import grpc

from decode.entry import Drawn, Event, Finished, Reservation
from decode.event_sender import DecodeEventSender
from decode.scheduler import DecodeScheduler
from engine.core.request import FinishReason, Request
from engine.memory.layout import bytes_per_page, travelling
from pool.request.conversion import in_vocabulary
from pool.request.entry import DataRanks, Failed
from pool.request.handler import EventPost, RequestParts, read_request, serve
from pool.request.router_call import Inbox, Opening, RequestKind, RouterCall, SessionChanged
from protos import decode_pb2 as pb
from protos import decode_pb2_grpc, types_pb2
from runtime.clock import SystemClock
from runtime.digests import check_compatible, in_common, share_draft
from runtime.errors import (
    BatonError,
    DeadlineError,
    FieldViolation,
    HandoffError,
    IntegrityError,
    InternalError,
    InvalidRequestError,
    PeerLostError,
)
from runtime.observe.metrics import ArrivalMetrics
from runtime.observe.tracing import begin
from runtime.rpc.calls import CallTracker
from transfer.plan import codec
from transfer.plan.copy_plan import plan_destination
from transfer.plan.handoff_terms import DestinationTerms, SourceTerms
from transfer.session import ReceiveSession, ReceiveState, SessionDeadlines
from transfer.transport.authenticator import new_key

HANDOFF_TIMEOUT_S = 60.0  # seconds in one state of the handoff, for a request without a deadline

DecodeInbox = Inbox[pb.DecodeInput, Event]

_REASONS = {
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: types_pb2.FINISH_REASON_ABORTED,
}


@dataclass(frozen=True, kw_only=True)
class DecodeParts(RequestParts):
    """The components that a request on this pool uses."""

    ranks: DataRanks[DecodeScheduler]
    arrivals: ArrivalMetrics


class DecodeHandler:
    """One request on this pool with its session and its memory.

    Implements `pool.request.handler.RequestHandler`.
    """

    def __init__(
        self,
        parts: DecodeParts,
        inbox: DecodeInbox,
        event_sender: DecodeEventSender,
        request: Request,
        reservation: Reservation,
        source: SourceTerms,
        alike: str,
        patience_s: float,
    ) -> None:
        """Create the handler of a request whose memory is reserved.

        `source` is the first prefill worker to send the prompt. `alike` is the part of the
        compatibility that it shares with this pool. `patience_s` is the longest that one state of
        the handoff may last.
        """
        self._parts = parts
        self._inbox = inbox
        self._event_sender = event_sender
        self._request = request
        self._reservation = reservation
        self._source = source
        self._alike = alike
        # A prompt lands while it is computed, and a lost source is replaced when another worker's
        # queue allows it. So the request's deadline bounds how long each state may take.
        self._session = ReceiveSession(
            secrets.token_hex(8),
            num_stages=parts.leader.group.session_size,
            clock=SystemClock(),
            deadlines=SessionDeadlines.within(patience_s),
        )
        self._is_open = False
        self._with_draft = False  # whether the draft model's state is sent as well
        self._first_token: int | None = None
        self._first_token_s = 0.0
        self._opened_s = 0.0
        self._phase = begin(
            "baton.transfer.receive",
            request_id=request.request_id,
            session_id=self._session.session_id,
        )

    async def run(self) -> None:
        offer: SourceTerms | None = self._source
        while offer is not None:
            destination = await self._shake_hands(offer)
            offer = destination if isinstance(destination, SourceTerms) else None
            if isinstance(destination, DestinationTerms):
                self._event_sender.destination(codec.destination_to_proto(destination))
                offer = await self._land()
            if offer is not None:
                self._parts.meters.handoff.failures.labels("source_replaced").inc()
        await self._commit()
        await _finish(self._parts, self._inbox)

    def end(self) -> None:
        """Close open resources and release the memory once nothing can write it."""
        self._phase.end()
        key, session = self._reservation.key, self._session
        session.abort("its request ended")  # no effect if the request has joined
        self._parts.reclaimer.end(
            lambda: self._parts.ranks.of(key).release(key),
            session=session if self._is_open else None,
            close=(lambda: self._parts.leader.group.close_receive(session.session_id))
            if self._is_open
            else None,
        )

    async def _shake_hands(self, source: SourceTerms) -> DestinationTerms | SourceTerms:
        """Run `_open` and record its duration or failure."""
        meters, began_s = self._parts.meters, time.monotonic()
        try:
            answer = await self._open(source)
        except BatonError as error:
            meters.handshake_failed(error)
            raise
        if self._session.error is not None:
            meters.handshake_failed(self._session.error)
        elif isinstance(answer, DestinationTerms):
            meters.handoff.handshake_s.observe(time.monotonic() - began_s)
        return answer

    async def _open(self, source: SourceTerms) -> DestinationTerms | SourceTerms:
        """Post the receives of the next epoch on all stages.

        Return the destination terms once they are posted, or a new source to start over with. Every
        stage drains an older epoch by itself.

        Raises:
            InvalidRequestError: the source terms do not match the request.
            HandoffError: a stage did not post its receives in time.
        """
        parts, session = self._parts, self._session
        check_compatible(
            parts.leader.compatibility, source.compatibility, source.compatibility_text
        )
        if source.num_tokens != len(self._request.prompt_token_ids):
            raise InvalidRequestError(
                FieldViolation(
                    "source.num_tokens",
                    f"{source.num_tokens} differs from the prompt's "
                    f"{len(self._request.prompt_token_ids)} tokens",
                )
            )
        if not source.sends_rest and self._reservation.held_tokens:
            key = self._reservation.key
            self._reservation = await parts.leader.loop.submit(
                lambda: parts.ranks.of(key).unshare(key)
            )
        # The session advances only when nothing can fail any more, so that stages never miss an
        # epoch.
        epoch = session.epoch + 1 if self._is_open else session.epoch
        data_rank = self._reservation.data_rank
        destination = plan_destination(
            source,
            specs=parts.plan.geometry.specs,
            session_id=session.session_id,
            epoch=epoch,
            tag_base=secrets.randbits(64),
            key=new_key(),
            page_ids=self._reservation.prompt_page_ids,
            slot_id=self._reservation.slot_id,
            stages=parts.leader.group.endpoints(data_rank),
            with_draft=share_draft(self._alike, source.compatibility),
            held_tokens=self._reservation.held_tokens,
        )
        self._with_draft = destination.with_draft
        self._opened_s = time.monotonic()
        if self._is_open:
            session.next_epoch()
        self._is_open = True
        parts.leader.group.open_receive(
            source, destination, session, self._inbox.session_changed, data_rank
        )
        while session.state is ReceiveState.RESERVED:
            # HandoffError, because another pool may do better.
            new_source = await self._handle_arrival(
                session.time_left_s(), "every stage to post its receives", HandoffError
            )
            if new_source is not None:
                return new_source
        if session.error is not None and not isinstance(session.error, PeerLostError):
            # A lost source is left to the router, which also notices it and replaces it.
            raise session.error
        return destination

    async def _land(self) -> SourceTerms | None:
        """Wait for all bytes and the first token.

        Return None when both have arrived, or a new source to start over with.

        Raises:
            BatonError: the prompt's arrival failed, and the router named no other source.
        """
        session = self._session
        while not (session.state is ReceiveState.COMPLETE and self._first_token is not None):
            failed = session.state is ReceiveState.FAILED
            if failed and isinstance(session.error, IntegrityError):
                self._parts.arrivals.integrity_failures.inc()
                self._parts.meters.handoff.failures.labels(session.error.reason.lower()).inc()
                raise session.error
            failure = session.error
            try:
                new_source = await self._handle_arrival(session.time_left_s(), "the prompt to land")
            except DeadlineError:
                if failure is None:
                    raise
                raise failure from None
            if new_source is not None:
                return new_source
        return None

    async def _handle_arrival(
        self, timeout_s: float | None, waiting_for: str, failure: type[BatonError] = DeadlineError
    ) -> SourceTerms | None:
        """Handle one event before the commit, or raise `failure` on timeout."""
        match await self._inbox.get(timeout_s, waiting_for, failure):
            case SessionChanged():
                return None
            case Failed(error):
                raise error.again()
            case pb.DecodeInput() as message:
                return self._handle_input(message)
            case other:
                raise InternalError(f"unexpected {type(other).__name__} before the request joined")
        return None

    def _handle_input(self, message: pb.DecodeInput) -> SourceTerms | None:
        match message.WhichOneof("input"):
            case "first_token" if len(message.first_token.token_ids) == 1:
                (self._first_token,) = in_vocabulary(
                    "first_token",
                    message.first_token.token_ids,
                    self._parts.plan.description.facts.vocab_size,
                )
                self._first_token_s = time.monotonic()
                return None
            case "source_lost":
                self._session.source_lost()
                return None
            case "new_source":
                return codec.source_from_proto(message.new_source)
            case other:
                raise InvalidRequestError(FieldViolation("input", f"{other} is not expected now"))

    async def _commit(self) -> None:
        parts, session, first_token = self._parts, self._session, self._first_token
        assert first_token is not None
        now = time.monotonic()
        exposed_s = max(0.0, now - self._first_token_s)
        parts.arrivals.exposed_s.observe(exposed_s)
        parts.meters.on_handoff(
            len(self._request.prompt_token_ids),
            now - self._opened_s,
            held_tokens=self._reservation.held_tokens,
            with_draft=self._with_draft,
        )
        parts.arrivals.unsent_bytes.inc(self._unsent_bytes)
        session.commit()
        self._phase.note(num_bytes=session.num_bytes, exposed_s=exposed_s)
        self._phase.end()
        self._phase = begin("baton.decode.generate", request_id=self._request.request_id)
        self._event_sender.committed(
            pb.DecodeCommitted(transfer_exposed_s=exposed_s, num_bytes=session.num_bytes)
        )
        key, with_draft = self._reservation.key, self._with_draft
        await parts.leader.loop.submit(
            lambda: parts.ranks.of(key).join(key, first_token, with_draft=with_draft)
        )
        parts.leader.group.close_receive(session.session_id)

    @property
    def _unsent_bytes(self) -> int:
        geometry = self._parts.plan.geometry
        num_pages = self._reservation.held_tokens // geometry.page_size
        return num_pages * bytes_per_page(travelling(geometry.specs, with_draft=self._with_draft))


class LocalPrefillHandler:
    """A request whose prompt is cached except for a short rest, which this pool computes.

    Implements `pool.request.handler.RequestHandler`.
    """

    def __init__(self, parts: DecodeParts, inbox: DecodeInbox, reservation: Reservation) -> None:
        self._parts = parts
        self._inbox = inbox
        self._reservation = reservation

    async def run(self) -> None:
        self._parts.arrivals.local_prefills.labels("short_rest").inc()
        await _finish(self._parts, self._inbox)

    def end(self) -> None:
        key = self._reservation.key
        self._parts.reclaimer.end(lambda: self._parts.ranks.of(key).release(key))


async def _finish(parts: DecodeParts, inbox: DecodeInbox) -> None:
    """Wait until a running request finishes.

    Raises:
        BatonError: the request failed.
    """
    while True:
        match await inbox.get(None, "the request to finish"):
            case Finished(queue_s=queue_s):
                parts.meters.work.queue_s.observe(queue_s)
                return
            case Failed(error):
                raise error.again()
            case _:
                continue  # an offer that crossed the commit has no effect


def _emit(post: EventPost, receive: Callable[[Event], None], event: Event) -> None:
    """Post an event to the event loop's thread; called on the engine thread.

    Tokens may wait for those of the next steps if these are short.
    """
    post.put(receive, event, can_wait=isinstance(event, Drawn))


def _receive(event_sender: DecodeEventSender, inbox: DecodeInbox, event: Event) -> None:
    """Send an engine event to the router, and pass those that end the request to its handler."""
    if isinstance(event, Drawn):
        event_sender.drawn(event.tokens)
        return
    if isinstance(event, Finished):
        event_sender.finished(
            pb.DecodeFinished(
                reason=_REASONS[event.reason],
                stop_token_id=event.stop_token_id,
                queue_s=event.queue_s,
                decode_s=event.decode_s,
                num_preemptions=event.num_preemptions,
            )
        )
    inbox.happened(event)


Context = grpc.aio.ServicerContext[pb.DecodeInputs, pb.DecodeEvents]


class DecodeService(decode_pb2_grpc.DecodeServicer):
    """The gRPC servicer of the Decode service.

    The scheduler makes every decision, and the transfer agents move every byte.
    """

    def __init__(self, parts: DecodeParts, calls: CallTracker) -> None:
        """Create the servicer; `calls` tracks the calls of its server."""
        self._parts = parts
        for scheduler in parts.ranks.schedulers:
            scheduler.on_preempted = parts.arrivals.preempted
        self._calls = calls
        self._kind: RequestKind[pb.DecodeInput, pb.DecodeEvent] = RequestKind(
            "/baton.v1.Decode/Generate",
            self._generate,
            lambda item: item.open.context,
            lambda key, ended: pb.DecodeEvent(key=key, ended=ended),
        )

    async def Serve(
        self, request_iterator: AsyncIterator[pb.DecodeInputs], context: Context
    ) -> AsyncIterator[pb.DecodeEvents]:
        num_taken = len(self._parts.ranks.schedulers) * self._parts.plan.max_held
        call = RouterCall(
            self._kind, self._calls, self._parts.meters.handoff.leases_expired, num_taken
        )
        async with aclosing(
            call.events(message.inputs async for message in request_iterator)
        ) as batches:
            async for events in batches:
                yield pb.DecodeEvents(events=events)

    async def _generate(self, opening: Opening[pb.DecodeInput, pb.DecodeEvent]) -> None:
        parts, asked = self._parts, opening.input.open
        request = read_request(parts, asked.request, role="decode")
        source = codec.source_from_proto(asked.source) if asked.HasField("source") else None
        replayed = _replayed(asked, request, vocab_size=parts.plan.description.facts.vocab_size)
        inbox: DecodeInbox = opening.inbox
        clock = parts.ranks.schedulers[0].clock
        ends_at_s = clock.now() + opening.ends_in_s
        event_sender = DecodeEventSender(
            opening.event_sender, 0 if source is None else 1 + len(replayed)
        )
        emit = partial(_emit, parts.post, partial(_receive, event_sender, inbox))

        async def take_place() -> DecodeHandler | LocalPrefillHandler:
            mine = parts.leader.compatibility.digest
            alike = mine if source is None else in_common(mine, source.compatibility)
            blocks, kept_as = (
                parts.blocks_of(request, alike),
                alike if parts.caches and request.uses_cache else "",
            )

            def take(scheduler: DecodeScheduler) -> Reservation:
                admit = (
                    scheduler.read_rest
                    if source is None
                    else partial(scheduler.reserve, replayed=replayed)
                )
                taken = admit(
                    request, emit, blocks=blocks, compatibility=kept_as, ends_at_s=ends_at_s
                )
                # Posted through the same queue as tokens, so that it precedes them.
                if source is None:
                    parts.post.put(
                        event_sender.local, pb.DecodeLocal(cached_tokens=taken.held_tokens)
                    )
                return taken

            reservation = await parts.leader.loop.submit(
                lambda: parts.ranks.place(request, blocks, take),
                undo=lambda taken: parts.ranks.of(taken.key).release(taken.key),
            )
            if source is None:
                return LocalPrefillHandler(parts, inbox, reservation)
            patience_s = (
                HANDOFF_TIMEOUT_S if math.isinf(ends_at_s) else max(0.0, ends_at_s - clock.now())
            )
            return DecodeHandler(
                parts, inbox, event_sender, request, reservation, source, alike, patience_s
            )

        await serve(parts, request, take_place)


def _replayed(opening: pb.DecodeOpen, request: Request, *, vocab_size: int) -> tuple[int, ...]:
    """Return the replayed tokens.

    Raises:
        InvalidRequestError: this request cannot have sampled these tokens.
    """
    if (count := len(opening.replayed_token_ids)) >= request.max_tokens:
        raise InvalidRequestError(
            FieldViolation(
                "replayed_token_ids",
                f"the first token and {count} replayed ones exceed max_tokens, {request.max_tokens}",
            )
        )
    return in_vocabulary("replayed_token_ids", opening.replayed_token_ids, vocab_size)
