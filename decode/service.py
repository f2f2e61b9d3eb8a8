"""The Decode service: one stream is one request, from reservation to its last token.

    open ─▶ reserve on all stages, post receives ─▶ landing ─▶ … bytes land, digests match …
         first_token ─────────────────────────────────────────▶ committed ─▶ tokens … ─▶ finished
         new_source (the prefill worker died) ─▶ landing of the next epoch, same memory
"""

import logging
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc

from decode.scheduler import DecodeScheduler, Drawn, Event, Failed, Finished, Reservation
from engine.request import FinishReason, Request
from pool.handoff import HandoffProgress
from pool.inbox import Inbox, SessionReport, StreamEnded
from pool.janitor import Janitor
from pool.leader import Leader
from pool.metrics import StageMeters
from pool.requests import chunk_to_proto, request_from_proto
from pool.stage import StagePlan
from protos import decode_pb2 as pb
from protos import decode_pb2_grpc, types_pb2
from runtime.errors import (
    FieldViolation,
    HandoffError,
    IntegrityError,
    InternalError,
    InvalidRequestError,
    RequestAborted,
    UnavailableError,
)
from runtime.log import bind
from transfer import codec
from transfer.agent import landing_for
from transfer.compatibility import check_compatible
from transfer.terms import Landing, SourceTerms

Context = grpc.aio.ServicerContext[pb.DecodeRequest, pb.DecodeResponse]
OPEN_TIMEOUT_S = 10.0
HANDOFF_TIMEOUT_S = 60.0
NEW_SOURCE_TIMEOUT_S = 30.0  # how long a reservation outlives its prefill worker

logger = logging.getLogger(__name__)

DecodeInbox = Inbox[pb.DecodeRequest, Event]

_REASONS = {
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: types_pb2.FINISH_REASON_ABORTED,
}


@dataclass(frozen=True)
class DecodeParts:
    """What a request on this pool works with."""

    leader: Leader
    scheduler: DecodeScheduler
    plan: StagePlan
    janitor: Janitor
    meters: StageMeters


class DecodeService(decode_pb2_grpc.DecodeServicer):
    """Thin: every decision is the scheduler's, every byte the transfer agents'."""

    def __init__(self, parts: DecodeParts) -> None:
        self._parts = parts

    async def Generate(self, request_iterator: AsyncIterator[pb.DecodeRequest],
                       context: Context) -> AsyncIterator[pb.DecodeResponse]:
        parts = self._parts
        if not parts.leader.serving:
            raise UnavailableError(f"the decode pool does not serve: {parts.leader.reason}")
        inbox: DecodeInbox = Inbox(request_iterator)
        opening = await inbox.first_message(OPEN_TIMEOUT_S)
        if opening.WhichOneof("input") != "open":
            raise InvalidRequestError(FieldViolation("input", "the first message must be open"))
        request = request_from_proto(opening.open.request, vocab_size=parts.plan.description.facts.vocab_size,
                                     max_context_tokens=parts.plan.max_context_tokens)
        source = codec.source_from_proto(opening.open.source)
        with bind(request_id=request.request_id), inbox:
            reservation = await parts.leader.loop.submit(lambda: parts.scheduler.reserve(request, inbox.emit))
            arrival = _Arrival(parts, inbox, request, reservation)
            try:
                async for response in arrival.run(source):
                    yield response
            finally:
                arrival.end()


class _Arrival:
    """One request on this pool, its session and its memory."""

    def __init__(self, parts: DecodeParts, inbox: DecodeInbox, request: Request, reservation: Reservation) -> None:
        self._parts = parts
        self._inbox = inbox
        self._request = request
        self._reservation = reservation
        self._session_id = ""
        self._nonce = secrets.randbits(32)
        self._progress: HandoffProgress | None = None
        self._first_token: int | None = None
        self._first_token_s = 0.0
        self._opened_s = 0.0

    async def run(self, source: SourceTerms) -> AsyncIterator[pb.DecodeResponse]:
        landed = False
        while not landed:
            yield pb.DecodeResponse(landing=codec.landing_to_proto(await self._open(source)))
            new_source = await self._land()
            if new_source is None:
                landed = True
            else:
                await self._drain_for_next_epoch()
                source = new_source
        yield await self._commit()
        async for response in self._tokens():
            yield response

    def end(self) -> None:
        """Close what is open and give the memory back once nothing can write it."""
        key, session_id = self._reservation.key, self._session_id
        self._parts.janitor.end(
            lambda: self._parts.scheduler.release(key), session_id=session_id, progress=self._progress,
            close=(lambda: self._parts.leader.group.close_receive(session_id)) if session_id else None)

    async def _open(self, source: SourceTerms) -> Landing:
        """Post receives for the next epoch on all stages and wait until they are."""
        check_compatible(self._parts.plan.compatibility, source.compatibility, source.compatibility_text)
        if source.num_tokens != len(self._request.prompt_token_ids):
            raise InvalidRequestError(FieldViolation(
                "source.num_tokens", f"{source.num_tokens} differs from the prompt's "
                                     f"{len(self._request.prompt_token_ids)} tokens"))
        epoch = 0 if self._progress is None else self._progress.epoch + 1
        session_id = self._session_id or secrets.token_hex(8)
        landing = landing_for(source, specs=self._parts.plan.geometry.specs, session_id=session_id, epoch=epoch,
                              nonce=self._nonce, page_ids=self._reservation.prompt_page_ids,
                              slot_id=self._reservation.slot_id, stages=self._parts.leader.group.endpoints)
        self._session_id = session_id
        self._progress = HandoffProgress(len(self._parts.plan.ranges), epoch)
        self._opened_s = time.monotonic()
        self._parts.leader.group.open_receive(source, landing, self._inbox.report)
        while not self._progress.opened:
            if self._progress.error is not None:
                raise self._progress.error
            await self._handle_until_landed(OPEN_TIMEOUT_S, "every stage to post its receives")
        return landing

    async def _land(self) -> SourceTerms | None:
        """Wait for all bytes and the first token; None when both are here, else the source to start over with."""
        progress = self._progress
        assert progress is not None
        while not (progress.complete and self._first_token is not None):
            if isinstance(progress.error, IntegrityError):
                self._parts.meters.transfer.integrity_failures.inc()
                raise progress.error
            failed = progress.error is not None
            new_source = await self._handle_until_landed(
                NEW_SOURCE_TIMEOUT_S if failed else HANDOFF_TIMEOUT_S,
                f"a new prefill worker after: {progress.error}" if failed else "the prompt to land")
            if new_source is not None:
                return new_source
        return None

    async def _handle_until_landed(self, timeout_s: float, waiting_for: str) -> SourceTerms | None:
        """Handle one happening of the handoff phase."""
        item = await self._inbox.get(timeout_s, waiting_for)
        match item:
            case SessionReport(rank, event):
                if self._progress is not None:
                    self._progress.on_report(rank, event)
            case StreamEnded():
                raise RequestAborted("the router closed the stream before the handoff was complete")
            case Failed(error):
                raise error
            case pb.DecodeRequest():
                return self._handle_input(item)
            case _:
                raise InternalError(f"unexpected {type(item).__name__} before the request joined")
        return None

    def _handle_input(self, message: pb.DecodeRequest) -> SourceTerms | None:
        match message.WhichOneof("input"):
            case "first_token" if len(message.first_token.token_ids) == 1:
                self._first_token = message.first_token.token_ids[0]
                self._first_token_s = time.monotonic()
                return None
            case "new_source":
                return codec.source_from_proto(message.new_source)
            case other:
                raise InvalidRequestError(FieldViolation("input", f"{other} is not expected now"))

    async def _drain_for_next_epoch(self) -> None:
        """The old epoch's receives must be gone before the same pages are offered again."""
        progress = self._progress
        assert progress is not None
        self._parts.meters.transfer.failures.labels("source_replaced").inc()
        self._parts.leader.group.close_receive(self._session_id)
        while not progress.drained:
            item = await self._inbox.get(HANDOFF_TIMEOUT_S, "the old epoch to drain")
            match item:
                case SessionReport(rank, event):
                    progress.on_report(rank, event)
                case StreamEnded():
                    raise RequestAborted("the router closed the stream while the handoff started over")
                case Failed(error):
                    raise error
                case pb.DecodeRequest() if item.WhichOneof("input") == "first_token":
                    self._handle_input(item)
                case _:
                    raise HandoffError(f"unexpected {type(item).__name__} while the old epoch drains")

    async def _commit(self) -> pb.DecodeResponse:
        progress, first_token = self._progress, self._first_token
        assert progress is not None
        assert first_token is not None
        now = time.monotonic()
        exposed_s = max(0.0, now - self._first_token_s)
        self._parts.meters.transfer.exposed_s.observe(exposed_s)
        self._parts.meters.transfer.transfer_s.observe(now - self._opened_s)
        self._parts.meters.on_handoff(len(self._request.prompt_token_ids))
        key = self._reservation.key
        await self._parts.leader.loop.submit(lambda: self._parts.scheduler.join(key, first_token))
        self._parts.leader.group.close_receive(self._session_id)
        return pb.DecodeResponse(committed=pb.DecodeCommitted(transfer_exposed_s=exposed_s,
                                                              num_bytes=progress.num_bytes))

    async def _tokens(self) -> AsyncIterator[pb.DecodeResponse]:
        while True:
            item = await self._inbox.get(None, "tokens")
            match item:
                case Drawn(token):
                    yield pb.DecodeResponse(tokens=chunk_to_proto(token))
                case Finished():
                    self._parts.meters.work.queue_s.observe(item.queue_s)
                    self._parts.meters.work.preemptions.inc(item.num_preemptions)
                    yield pb.DecodeResponse(finished=_finished_to_proto(item))
                    return
                case Failed(error):
                    raise error
                case SessionReport(rank, event):
                    if self._progress is not None:
                        self._progress.on_report(rank, event)
                case StreamEnded():
                    continue  # a router with nothing more to say may half-close
                case _:
                    raise InvalidRequestError(FieldViolation("input", "nothing is expected after the commit"))


def _finished_to_proto(event: Finished) -> pb.DecodeFinished:
    return pb.DecodeFinished(reason=_REASONS[event.reason], stop_token_id=event.stop_token_id, queue_s=event.queue_s,
                             decode_s=event.decode_s, num_preemptions=event.num_preemptions)
