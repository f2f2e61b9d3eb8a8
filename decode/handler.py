"""The handling of one request on a decode pool: its handoff, its prompt, and its tokens."""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from decode.entry import DecodeEntryEvent, Finished, Generated
from decode.event_sender import DecodeEventSender
from decode.local_prompts import PromptReader
from decode.request_memory import Reservation
from decode.scheduler import DecodeScheduler
from engine.core.request import FinishReason, Request
from engine.memory.layout import bytes_per_page, travelling
from pool.request.conversion import in_vocabulary
from pool.request.entry import DataRanks, Failed
from pool.request.handler import RequestParts
from pool.request.streams import Inbox, SessionChanged
from protos import decode_pb2 as pb
from protos import types_pb2
from runtime.clock import SystemClock
from runtime.digests import check_compatible, prompt_digest, share_draft
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
from runtime.observe.metrics.handoffs import ArrivalMetrics
from runtime.observe.tracing import begin
from transfer.plan import codec
from transfer.plan.copy_plan import plan_destination
from transfer.plan.handoff_terms import DestinationTerms, SourceTerms
from transfer.plan.term_checks import check_content
from transfer.session import ReceiveSession, SessionTimeouts
from transfer.session_states import ReceiveState
from transfer.transport.authenticator import new_key

DecodeInbox = Inbox[pb.DecodeInput, DecodeEntryEvent]
_REASONS = {
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: types_pb2.FINISH_REASON_ABORTED,
}


@dataclass(frozen=True, kw_only=True)
class DecodeParts(RequestParts):
    """The components that a request on this pool uses.

    On a pool that also prefills, `prompts_of` returns the reader that has the prompt of a key. The
    stages of such a pool report the computed layers of every request to their transfer agents,
    which have to forget them at its end.
    """

    ranks: DataRanks[DecodeScheduler]
    arrivals: ArrivalMetrics
    prompts_of: Callable[[int], PromptReader | None] | None = None

    def first_token_of(self, message: pb.DecodeInput) -> int:
        """Return the first token of a message that has one. Raises HandoffError."""
        vocab_size = self.plan.description.facts.vocab_size
        try:
            (token,) = in_vocabulary("first_token", message.first_token.token_ids, vocab_size)
        except InvalidRequestError as error:  # of the source, not of the client
            raise HandoffError(str(error)) from None
        return token

    def forget(self, key: int) -> None:
        """Let the stages forget the computed layers of a request."""
        if self.prompts_of is not None:
            self.leader.group.close_request(key, None)


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
        timeout_s: float,
    ) -> None:
        """Create the handler of a request whose memory is reserved.

        `source` is the first prefill worker to send the prompt. `alike` is the part of the
        compatibility that it shares with this pool. `timeout_s` is the longest that one state of
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
            timeouts=SessionTimeouts.within(timeout_s),
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
        await finish(self._parts, self._inbox)

    def end(self) -> None:
        """Close open resources and release the memory once nothing can write it."""
        self._phase.end()
        key, session = self._reservation.key, self._session
        session.abort("its request ended")  # no effect if the request has joined
        self._parts.reclaimer.end(
            lambda: self._parts.ranks.of(key).release(key),
            session=session if self._is_open else None,
            close=self._close,
        )

    def _close(self) -> None:
        if self._is_open:
            self._parts.leader.group.close_session(self._session.session_id)
        self._parts.forget(self._reservation.key)

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
            IncompatiblePeerError: the source offers other tokens, or its terms fit no handoff.
            HandoffError: a stage did not post its receives in time, or the source that replaces
                another one is this pool. A session has one direction in a pool, so the request must
                start over to take the prompt over in place.
        """
        parts, session = self._parts, self._session
        self._check(source)
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
                session.remaining_s(), "every stage to post its receives", HandoffError
            )
            if new_source is not None:
                return new_source
        if session.error is not None and not isinstance(session.error, PeerLostError):
            # A lost source is left to the router, which also notices it and replaces it.
            raise session.error
        return destination

    def _check(self, source: SourceTerms) -> None:
        """Check that a source sends this prompt, computed in the same way, from another pool.

        Raises:
            HandoffError: it is this pool.
            IncompatiblePeerError: it is another prompt, or of other weights or numerics.
        """
        leader, prompt = self._parts.leader, self._request.prompt_token_ids
        if leader.group.includes(source.stages):
            raise HandoffError("the new source of the prompt is this pool itself")
        check_compatible(leader.compatibility, source.compatibility, source.compatibility_text)
        check_content(source, len(prompt), prompt_digest(prompt, self._request.adapter))

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
                new_source = await self._handle_arrival(session.remaining_s(), "the prompt to land")
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
                self._first_token = self._parts.first_token_of(message)
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
        parts.leader.group.close_session(session.session_id)

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
        kind = "short_rest" if self._parts.prompts_of is None else "own_prompt"
        self._parts.arrivals.local_prefills.labels(kind).inc()
        await finish(self._parts, self._inbox)

    def end(self) -> None:
        key = self._reservation.key
        self._parts.reclaimer.end(
            lambda: self._parts.ranks.of(key).release(key),
            close=lambda: self._parts.forget(key),
        )


async def finish(parts: DecodeParts, inbox: DecodeInbox) -> None:
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


def receive(event_sender: DecodeEventSender, inbox: DecodeInbox, event: DecodeEntryEvent) -> None:
    """Send an engine event to the router, and pass those that end the request to its handler."""
    if isinstance(event, Generated):
        event_sender.generated(event.tokens)
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
