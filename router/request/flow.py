"""One request, from admission to its end.

Life of a request:

 1. `Admission` queues it until a compatible pair has capacity soon, and books both workers.
 2. The router opens a stream to a prefill worker. The worker queues the request and sends
    `started`, with the terms of its handoff, when its turn comes.
 3. The router opens a stream to a decode pool with these terms. The pool reserves memory on all
    stages and replies with `DestinationTerms`, or refuses and the next pool gets the offer. When
    all pools refuse, the router offers it again while prefill computes.
 4. The destination terms go to the prefill worker, which starts to send.
 5. `first_token` arrives from prefill and goes to the client at once, and to decode.
 6. `committed` arrives from decode when all pages have landed and were verified. The prefill worker
    may then release its memory, and its stream ends.
 7. Tokens arrive from decode and go to the client until `finished`, which also ends that stream. If
    the text contains a stop string, closing the streams is the abort.

If a pool has nearly all of the prompt cached, it is asked first to compute the rest itself. Steps 2
to 6 are then skipped.

A response that another router began takes the same way. Decode recomputes the tokens that the
client has, as after a migration.

Failures. A prefill worker that dies or fails before the commit is replaced, within bounds. The
terms of its replacement go to the same reservation, which receives again under its next epoch. The
first token of the replacement must equal the one already sent. A pair whose handoff failed although
both workers live is remembered as failed; if no source is left for the pool, the request migrates.
If a decode pool is lost or drains after it reserved, the request migrates, too (`Migrations`):
another pair starts over at 2. It recomputes the tokens already sent without sampling or sending
them again, and the stream goes on. Every end of a request (its last token, an error, the client,
Abort, the deadline) leaves through the `finally` of `_serve`, which closes both streams and
releases both bookings.

Worker events are handled as they arrive on the call that all requests to a worker share. An event
that has to wait, and every event after it, is handled by the request's own task. A search for
another worker runs in a task of its own; its task group ends with the request.
"""

import asyncio
from dataclasses import dataclass

from protos import decode_pb2, generation_pb2, prefill_pb2, types_pb2
from router.request.admission import Admission
from router.request.answer import Answer, finish_of
from router.request.retries import Migrations, lost
from router.request.service_times import ServiceRecord, ServiceTimeModel
from router.request.streams import DecodeStream, PrefillStream
from router.request.validate import AdmissibleRequest
from router.request.worker_stream import (
    Ended,
    FlowInbox,
    FlowLimits,
    FlowParts,
    Over,
    Overdue,
    Received,
    StreamEvent,
    task_group,
)
from router.workers.directory import Directory, WorkerPair
from router.workers.worker import WorkerRole
from runtime.clock import Deadline
from runtime.errors import (
    BatonError,
    CapacityError,
    DeadlineError,
    FieldViolation,
    HandoffError,
    InternalError,
    InvalidRequestError,
    PeerLostError,
    UnavailableError,
)
from runtime.observe.metrics import RouterMetrics
from runtime.observe.tracing import begin, outgoing

CLOCKS_DIFFER_S = 0.05  # tolerance between a client's deadline and this router's


@dataclass(frozen=True)
class Services:
    """Objects that all requests of a router share."""

    admission: Admission
    directory: Directory
    limits: FlowLimits
    metrics: RouterMetrics
    service_model: ServiceTimeModel


class RequestFlow:
    """Driver of one request. `run` may be called once."""

    def __init__(
        self, request: AdmissibleRequest, answer: Answer, services: Services, timeout_s: float
    ) -> None:
        self._request = request
        self._answer = answer
        self._timeline = answer.timeline
        resumed = request.resumed_of(0)
        if resumed:
            self._timeline.resumed()
        self._services = services
        self._timeout_s = timeout_s
        self._deadline = Deadline.after(services.service_model.clock, timeout_s)
        self._time_scope = asyncio.timeout(timeout_s)
        self._is_running = False
        self._is_aborted = False
        self._inbox = FlowInbox()
        self._first_token = types_pb2.TokenChunk(token_ids=resumed[:1]) if resumed else None
        self._migrations = Migrations(services.directory, services.limits, services.metrics)
        self._is_committed = False
        self._num_cached = 0  # prompt tokens that the prefill worker had cached
        self._finish: generation_pb2.GenerateFinish | None = None

    @property
    def request_id(self) -> str:
        return self._request.engine.request_id

    def abort(self) -> None:
        """End the request now, with FINISH_REASON_ABORTED. Idempotent."""
        self._is_aborted = True
        if self._is_running and not self._time_scope.expired():
            self._time_scope.reschedule(asyncio.get_running_loop().time())

    async def run(self) -> None:
        """Emit chunks and then exactly one finish, or raise the one BatonError that the client
        receives.

        Raises:
            DeadlineError: the time limit passed first.
            BatonError: the request failed otherwise.
        """
        token_ids = self._answer.token_ids
        finish = self._answer.stopped or finish_of(token_ids, self._request.engine)
        try:
            async with self._time_scope:
                if finish is None:
                    await self._run()
                else:
                    self._conclude(finish)
        except TimeoutError:
            self._out_of_time()
        except asyncio.CancelledError:
            self._timeline.ended("cancelled")
            raise
        finally:
            self._timeline.ended("failed")  # no effect if another outcome was recorded

    async def _run(self) -> None:
        self._is_running = True
        if self._is_aborted:
            self.abort()
        held_back = begin("baton.router.admit", request_id=self.request_id)
        try:
            async with self._services.admission.pair_for(self._request, self._deadline) as pair:
                held_back.end()
                self._timeline.placed()
                estimated_s = self._services.admission.service_s(
                    self._request, pair.prefill.num_tokens
                )
                self._record = ServiceRecord(
                    self._services.service_model,
                    self._request.client,
                    self._request.engine.max_tokens,
                    estimated_s,
                )
                try:
                    with self._services.metrics.running.track_inprogress():
                        await self._serve(pair)
                except (CapacityError, UnavailableError) as error:
                    error.retry_after_s = self._services.admission.retry_after_s(
                        error, self._request
                    )
                    raise
        finally:
            held_back.end()
            self._is_running = False

    @property
    def _is_out_of_time(self) -> bool:
        """Return whether the deadline ends the request, even if the client's end of the call
        noticed first.
        """
        return not self._is_aborted and self._deadline.remaining_s() <= CLOCKS_DIFFER_S

    def _out_of_time(self) -> None:
        if self._answer.has_ended:
            return
        if not self._is_aborted:
            raise DeadlineError(
                f"the request did not end within its {self._timeout_s:g} s"
            ) from None
        self._answer.rest()
        self._answer.finish(generation_pb2.GenerateFinish(reason=types_pb2.FINISH_REASON_ABORTED))

    async def _serve(self, pair: WorkerPair) -> None:
        async with task_group() as group:
            self._parts = FlowParts(
                self._request.engine,
                self._request.prompt,
                self._services.directory,
                self._services.limits,
                group,
                self._deadline,
                outgoing(),
                self._happened,
                lambda: self._inbox.post(Overdue()),
            )
            self._start(pair)
            try:
                while self._finish is None:
                    await self._handle(await self._inbox.get())
                self._end(self._finish)
            finally:
                if self._finish is None and self._is_out_of_time:
                    self._record.cut_off()
                self._prefill.close()
                self._decode.close()
                if self._migrations.under_way is not None:
                    self._migrations.ended()

    def _start(self, pair: WorkerPair) -> None:
        """Start the request on this pair, with the tokens that its client already has."""
        self._is_committed = False
        self._answer.sampled_by = self._request.sampled_by(pair.decode.compatibility)
        self._prefill = PrefillStream(self._parts, pair.prefill)
        self._decode = DecodeStream(self._parts, pair.decode, self._answer.token_ids[1:])
        if self._first_token is None and self._decode.may_compute_rest:
            self._decode.request_local_prefill()
        else:
            self._prefill.run()

    def _happened(self, event: Received | Ended) -> None:
        """Handle a worker's event at once, or queue it if it has to wait or others already do."""
        try:
            if not self._inbox.is_idle or self._has_to_wait(event):
                self._keep(event)
                return
            if isinstance(event, Received):
                self._handle_now(event)
            if self._finish is not None:
                self._inbox.post(Over())
        except Exception as error:  # noqa: BLE001 - it ends this request only
            self._inbox.post(Over(error))

    def _has_to_wait(self, event: Received | Ended) -> bool:
        if isinstance(event, Received):
            return (
                event.event.HasField("scored")
                if isinstance(event.event, prefill_pb2.PrefillEvent)
                else False
            )
        return event.stream is not self._prefill.stream or not self._is_prefill_done

    def _keep(self, event: Received | Ended) -> None:
        """Queue an event for this request's task; end the stream if its queue is full."""
        if not self._inbox.post(event) and isinstance(event, Received):
            event.stream.close()
            self._inbox.post(Ended(event.stream, lost="it sent more than could be handled"))

    async def _handle(self, event: StreamEvent) -> None:
        match event:
            case Received():
                self._handle_now(event)
                await self._pass_scores(event)
            case Ended(stream=stream) if stream is self._prefill.stream:
                error = (
                    lost(self._prefill.booking.worker, event.lost) if event.lost else event.error
                )
                await self._prefill_ended(error)
            case Ended(stream=stream) if stream is self._decode.stream:
                error = lost(self._decode.booking.worker, event.lost) if event.lost else event.error
                await self._decode_ended(error)
            case Overdue() if self._decode.is_overdue:
                if self._decode.lacks_first_token:
                    await self._prefill_ended(self._prefill.overdue())
                else:
                    await self._decode_ended(self._decode.overdue())
            case Over(error=Exception() as error):
                raise error
        # Otherwise the event belongs to a stream that was closed: it is dropped.

    def _handle_now(self, received: Received) -> None:
        if received.stream is self._prefill.stream:
            if isinstance(received.event, prefill_pb2.PrefillEvent):
                self._on_prefill_event(received.event)
        elif received.stream is self._decode.stream and isinstance(
            received.event, decode_pb2.DecodeEvent
        ):
            self._on_decode_event(received.event)

    def _on_prefill_event(self, event: prefill_pb2.PrefillEvent) -> None:
        timings = self._timeline.timings
        match event.WhichOneof("event"):
            case "started":
                timings.prefill_queue_s = event.started.queue_s
                self._num_cached = event.started.cached_tokens
                self._answer.cached(self._num_cached)
                self._note_prediction(self._num_cached - self._prefill.booking.num_cached)
                self._timeline.reserving()
                try:
                    self._decode.offer(event.started.terms)
                except PeerLostError as error:
                    self._inbox.post(Ended(self._decode.stream, error))
            case "first_token":
                timings.prefill_s = event.first_token.prefill_s
                self._prefill.computed()
                num_computed = len(self._request.engine.prompt_token_ids) - self._num_cached
                self._record.prefilled(num_computed, timings.prefill_s)
                self._take_first_token(event.first_token.token)
                self._let_prefill_go()
            case "sent":
                if not self._is_committed:
                    self._decode.expect_commit()

    async def _pass_scores(self, received: Received) -> None:
        """Pass prompt scores to the client when its queue has room, before the first token."""
        event = received.event
        if (
            received.stream is self._prefill.stream
            and isinstance(event, prefill_pb2.PrefillEvent)
            and event.HasField("scored")
        ):
            await self._answer.scores(event.scored)
            self._prefill.scores_read()

    def _take_first_token(self, token: types_pb2.TokenChunk) -> None:
        if self._first_token is None:
            self._first_token = token
            self._emit(token)
            if self._finish is None:
                self._decode.first_token(token)
        elif list(token.token_ids) == list(self._first_token.token_ids):
            self._decode.first_token(token)
        elif self._request.resumed_of(0):
            raise InvalidRequestError(
                FieldViolation(
                    "resumed",
                    f"begins with {list(self._first_token.token_ids)}, the response to this request with "
                    f"{list(token.token_ids)}",
                )
            )
        else:
            raise InternalError(
                f"a second prefill worker sampled {list(token.token_ids)} as first token, the first one "
                f"{list(self._first_token.token_ids)}"
            )

    @property
    def _is_prefill_done(self) -> bool:
        return self._is_committed and self._first_token is not None

    async def _prefill_ended(self, error: BatonError | None) -> None:
        if self._is_prefill_done:
            return
        error = error or PeerLostError("the prefill worker ended its stream too early")
        if self._is_committed:
            raise error  # the handoff is done, but no worker can send the first token
        if isinstance(error, HandoffError) and self._has_failed_link():
            await self._decode_lost(PeerLostError(str(error)))
            self._timeline.retried(WorkerRole.DECODE, error.reason)
            return
        self._decode.source_lost()
        self._prefill.move_on(error, self._decode.booking)
        self._timeline.retried(WorkerRole.PREFILL, error.reason)

    def _has_failed_link(self) -> bool:
        """Record that this pair cannot hand over; return whether no source is left for the pool.

        Sources may still be left for another pool.
        """
        directory = self._services.directory
        directory.failed_links(self._prefill.booking, self._decode.booking)
        return not directory.is_fed(self._decode.booking, self._request.context_tokens)

    def _on_decode_event(self, event: decode_pb2.DecodeEvent) -> None:
        if not event.HasField("destination"):
            self._stepped(event)
        elif self._decode.reserved(event.destination):
            self._timeline.reserved()
            self._prefill.deliver_to(event.destination)

    def _stepped(self, event: decode_pb2.DecodeEvent) -> None:
        """Pass the tokens of the pool to the client."""
        if event.position != len(self._answer.token_ids):
            self._decode.broken(
                f"its next token is number {event.position}, the client has "
                f"{len(self._answer.token_ids)}"
            )
            return
        match event.WhichOneof("event"):
            case "tokens":
                if self._first_token is None:  # the pool prefilled the prompt locally
                    self._first_token = types_pb2.TokenChunk(token_ids=event.tokens.token_ids[:1])
                self._timeline.decoded()
                self._record.sampled(len(event.tokens.token_ids))
                self._emit(event.tokens)
            case "committed":
                exposed_s = self._timeline.timings.transfer_exposed_s = (
                    event.committed.transfer_exposed_s
                )
                self._services.directory.linked(
                    self._prefill.booking, self._decode.booking, exposed_s
                )
                self._decode.committed()
                self._joined()
                self._let_prefill_go()
            case "local":
                self._decode.local_prefill_accepted()
                self._prefill.close()
                self._answer.cached(event.local.cached_tokens)
                self._joined()
            case "finished":
                self._decode.finished()
                self._finished(event.finished)

    def _joined(self) -> None:
        """Record that the pool has the whole prompt."""
        self._is_committed = True
        self._record.committed(self._decode.booking)
        if self._migrations.under_way is not None:
            self._migrations.resumed()
        self._timeline.committed()

    async def _decode_ended(self, error: BatonError | None) -> None:
        error = error or PeerLostError("the decode worker ended its stream too early")
        if self._decode.has_reserved:
            await self._decode_lost(error)
        elif self._decode.local_prefill_requested:
            self._decode.local_prefill_rejected(error)
            self._prefill.run()
            return
        else:
            self._decode.move_on(error)
        self._timeline.retried(WorkerRole.DECODE, error.reason)

    async def _decode_lost(self, error: BatonError) -> None:
        """Continue on another pair after the pool that held the state was lost or gave the request
        up.
        """
        self._prefill.close()
        self._decode.close()
        self._record.moved()
        self._start(
            await self._migrations.another_pair(
                self._decode.booking, error, self._request.prompt, self._request.context_tokens
            )
        )

    def _note_prediction(self, surplus: int) -> None:
        """Count whether `surplus` more tokens were reused than the worker's reports predicted."""
        outcome = "equal" if surplus == 0 else "more" if surplus > 0 else "fewer"
        self._services.metrics.cache_predictions.labels(outcome).inc()

    def _let_prefill_go(self) -> None:
        if not self._is_prefill_done:
            return
        if self._prefill.has_first_token:
            self._prefill.release()
        else:
            self._prefill.close()  # its predecessor died after it had delivered everything

    def _finished(self, finished: decode_pb2.DecodeFinished) -> None:
        timings = self._timeline.timings
        timings.decode_queue_s = finished.queue_s
        timings.decode_s = finished.decode_s
        self._record.finished(finished.decode_s)
        self._finish = self._finish or generation_pb2.GenerateFinish(
            reason=finished.reason,
            stop_token_id=finished.stop_token_id if finished.HasField("stop_token_id") else None,
        )

    def _emit(self, tokens: types_pb2.TokenChunk) -> None:
        self._answer.tokens(tokens)
        self._finish = self._answer.stopped or self._finish

    def _end(self, finish: generation_pb2.GenerateFinish) -> None:
        """Conclude the request with the text held back and the finish."""
        self._record.ended(len(self._answer.token_ids))
        if self._answer.stopped is not None:
            # The workers would generate further tokens: closing the streams is the abort.
            self._prefill.close()
            self._decode.close()
        self._conclude(finish)

    def _conclude(self, finish: generation_pb2.GenerateFinish) -> None:
        self._answer.rest()
        self._answer.finish(self._answer.stopped or finish)
