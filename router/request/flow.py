"""The driver of one request: it runs the commands of the request's machine and feeds it events.

Worker events are handled as they arrive, on the call that all requests to a worker share. Only
while prompt scores wait for the client to read are they queued. Admission and searches wait in
tasks of their own, which end with the request.
"""

import asyncio
import contextvars
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from router.request import events as ev
from router.request.admission import Admission
from router.request.answer import Answer
from router.request.machine import RequestMachine
from router.request.notes import RequestNotes, booking_of
from router.request.resumption import finish_of
from router.request.retries import FlowLimits
from router.request.search import WorkerSearch
from router.request.service_times import ServiceRecord, ServiceTimeModel, TokenWork
from router.request.streams import RequestStreams
from router.request.tickets import AdmissionTicket, Placed
from router.request.transitions import IllegalEventError, RequestState
from router.request.validate import AdmissibleRequest
from router.request.worker_stream import DueTimer
from router.workers.directory import Directory
from router.workers.placement_request import WorkerPair
from router.workers.worker import Booking
from runtime.clock import Deadline
from runtime.errors import BatonError, CapacityError, UnavailableError
from runtime.observe.metrics.router import ClientMetrics, RouterMetrics
from runtime.observe.tracing import Span, begin

CLOCKS_DIFFER_S = 0.05  # tolerance between a client's deadline and this router's
MAX_QUEUED = 64  # events of one request; workers send few, or wait for the request


@dataclass(frozen=True)
class Services:
    """Objects that all requests of a router share."""

    admission: Admission
    directory: Directory
    limits: FlowLimits
    metrics: RouterMetrics
    service_model: ServiceTimeModel
    client_metrics: ClientMetrics


class RequestFlow:
    """Driver of one request. `run` may be called once."""

    def __init__(
        self, request: AdmissibleRequest, answer: Answer, services: Services, timeout_s: float
    ) -> None:
        self._request = request
        self.answer = answer
        self._timeline = answer.timeline
        resumed = request.resumed_of(0)
        self._num_resumed = len(resumed)
        if resumed:
            self._timeline.resumed()
        self._services = services
        self._timeout_s = timeout_s
        self._deadline = Deadline.after(services.service_model.clock, timeout_s)
        self._machine = RequestMachine(services.limits, timeout_s, resumed)
        preemption = services.admission.preemption
        self._search = WorkerSearch(
            services.directory,
            services.limits,
            request.placement,
            preemption,
            request.engine.priority,
        )
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        self._due_at_s: float | None = None
        self._due_timer = DueTimer(lambda: self._happened(ev.ReplyOverdue()))
        self._streams = RequestStreams(request.engine, self._deadline, self._deliver)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._events: deque[ev.RequestEvent] = deque()  # while another one is handled
        self._is_handling = False
        # Events of workers while prompt scores wait for the client; None otherwise.
        self._unread: deque[ev.RequestEvent] | None = None
        self._admitting: Span | None = None
        self._notes: RequestNotes | None = None  # once a pair is booked
        self._charged: TokenWork | None = None  # on placement
        self.work = TokenWork()  # computed and generated, once the request has ended
        self._end: ev.End | None = None
        self._ended = self._loop.create_future()
        self._run: Mapping[type[ev.Command], Callable[[Any], None]] = {
            ev.Reserve: self._reserve,
            ev.OpenPrefill: self._streams.open_prefill,
            ev.OpenDecode: self._streams.open_decode,
            ev.Send: self._streams.send,
            ev.Close: self._close,
            ev.Release: self._release,
            ev.MarkLost: self._mark_lost,
            ev.CheckLink: self._check_link,
            ev.SearchPrefill: self._search_worker,
            ev.SearchDecode: self._search_worker,
            ev.SearchPair: self._search_pair,
            ev.Emit: self._emit,
            ev.EmitScores: self._emit_scores,
            ev.Note: self._note,
            ev.NoteRetry: self._timeline.retried,
            ev.NoteMigration: self._note_migration,
            ev.End: self._stop,
        }

    @property
    def preemptible_on(self) -> Booking | None:
        """Return the booking of the pool on which the request may be preempted now."""
        pool = self._machine.preemptible_on
        return None if pool is None else booking_of(pool)

    def preempt(self) -> None:
        """Give way to a more urgent request; the stream pauses."""
        self._happened(ev.Preempted())

    def abort(self) -> None:
        """End the request now, with FINISH_REASON_ABORTED. Idempotent."""
        self._happened(ev.Aborted())

    async def run(self) -> None:
        """Emit chunks and then exactly one finish, or raise the one BatonError that the client
        receives.

        Raises:
            DeadlineError: the time limit passed first.
            BatonError: the request failed otherwise.
        """
        timer = self._loop.call_later(self._timeout_s, self._happened, ev.DeadlinePassed())
        try:
            finish = self.answer.stopped or finish_of(
                self._request.resumed_of(0), self._request.engine
            )
            self._happened(ev.Arrived() if finish is None else ev.ClientStopped(finish))
            await asyncio.shield(self._ended)
            if self._end is not None and self._end.error is not None:
                raise self._end.error
        except asyncio.CancelledError:
            self._happened(ev.ClientGone())
            self._timeline.ended("cancelled")
            raise
        finally:
            timer.cancel()
            await self._stop_tasks()
            self._timeline.ended("failed")  # no effect if another outcome was recorded

    async def _stop_tasks(self) -> None:
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)

    # Events.

    def _deliver(self, event: ev.Received | ev.StreamEnded) -> None:
        """Handle an event of a worker. The end of a stream is handled in the request's context,
        so that log lines carry its id.
        """
        if isinstance(event, ev.Received):
            self._happened(event)
        else:
            self._context.copy().run(self._happened, event)

    def _happened(self, event: ev.RequestEvent) -> None:
        """Handle an event, after those that are being handled. Raises nothing."""
        if self._unread is not None and isinstance(
            event, ev.Received | ev.StreamEnded | ev.ReplyOverdue
        ):
            self._queue(self._unread, event)
            return
        self._events.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        while self._events:
            self._handle(self._events.popleft())
        self._is_handling = False

    def _queue(self, unread: deque[ev.RequestEvent], event: ev.RequestEvent) -> None:
        """Queue an event of a worker; end the stream instead if too many are queued."""
        if len(unread) < MAX_QUEUED or not isinstance(event, ev.Received):
            unread.append(event)
        elif lost := self._streams.give_up(event.number, "it sent more than could be handled"):
            unread.append(ev.StreamEnded(event.number, lost))

    def _handle(self, event: ev.RequestEvent) -> None:
        try:
            try:
                commands = self._machine.on(event, self._loop.time())
            except IllegalEventError as illegal:
                if not isinstance(event, ev.Received):
                    raise
                # A worker that breaks the protocol counts as lost.
                lost = self._streams.give_up(event.number, str(illegal))
                commands = self._machine.on(ev.StreamEnded(event.number, lost), self._loop.time())
            for command in commands:
                self._run[type(command)](command)
            due_at_s = self._machine.due_at_s
            if due_at_s != self._due_at_s:
                self._due_at_s = due_at_s
                self._due_timer.expect(due_at_s)
        except Exception as error:  # noqa: BLE001 - it ends this request only
            if self._machine.state is RequestState.DONE:
                self._conclude(ev.End(error=error))
            else:
                self._events.append(ev.CommandFailed(error))

    # Commands.

    def _reserve(self, command: ev.Reserve) -> None:
        self._admitting = begin("baton.router.admit", request_id=self._request.engine.request_id)
        if self._request.engine.HasField("num_prompt_logprobs"):
            self._start(command.number, self._admit_scored(command.number))
            return
        admission = self._services.admission
        try:
            ticket = admission.arrive(self._request, self._deadline)
            placed = admission.place_at_once(ticket)
        except BatonError as error:
            self._happened(ev.NotAdmitted(error))
            return
        if placed is None:
            self._start(command.number, self._admit(command.number, ticket))
        else:
            self._placed(command.number, placed)

    async def _admit_scored(self, number: int) -> None:
        admission = self._services.admission
        async with admission.scoring_place(self._request):
            try:
                ticket = admission.arrive(self._request, self._deadline)
            except BatonError as error:
                self._happened(ev.NotAdmitted(error))
                return
            await self._admit(number, ticket)
            await asyncio.shield(self._ended)

    async def _admit(self, number: int, ticket: AdmissionTicket) -> None:
        try:
            placed = await self._services.admission.wait(ticket)
        except BatonError as error:
            self._happened(ev.NotAdmitted(error))
        else:
            self._placed(number, placed)

    def _placed(self, number: int, placed: Placed) -> None:
        if self._admitting is not None:
            self._admitting.note(placement=placed.pair.kind)
            self._admitting.end()
        services = self._services
        self._charged = placed.charged
        self._timeline.placed()
        record = ServiceRecord(
            services.service_model,
            self._request.client,
            self._request.engine.max_tokens,
            placed.service_s,
        )
        placement = services.directory.placement
        self._notes = RequestNotes(self._request, self.answer, record, placement, services.metrics)
        services.metrics.running.inc()
        services.admission.preemption.add(self, self._request.engine.priority)
        self._happened(self._pair_placed(number, placed.pair))

    def _pair_placed(self, number: int, pair: WorkerPair) -> ev.PairPlaced:
        num_missing = self._request.prompt.num_tokens - pair.decode.num_cached
        is_short = pair.decode.num_cached > 0 and pair.decode.worker.may_compute(num_missing)
        # The stream of a decode pool has no scores of the prompt.
        is_whole = pair.is_aggregated and not self._request.engine.HasField("num_prompt_logprobs")
        return ev.PairPlaced(number, pair.prefill, pair.decode, is_short or is_whole)

    def _close(self, command: ev.Close) -> None:
        self._streams.close(command)
        task = self._tasks.get(command.number)
        if task is not None:
            task.cancel()

    def _release(self, command: ev.Release) -> None:
        booking = booking_of(command.worker)
        if command.is_computed:
            booking.computed()
        else:
            # Later, so that requests that end with one message of a pool count as concurrent.
            self._loop.call_soon(booking.release)

    def _mark_lost(self, command: ev.MarkLost) -> None:
        booking_of(command.worker).lost(command.reason)

    def _check_link(self, command: ev.CheckLink) -> None:
        placement = self._services.directory.placement
        pool = booking_of(command.pool)
        placement.failed_link(booking_of(command.source), pool)
        is_fed = placement.is_fed(self._request.placement, pool)
        self._happened(ev.LinkChecked(command.number, is_fed))

    def _search_worker(self, command: ev.SearchPrefill | ev.SearchDecode) -> None:
        self._start(command.number, self._report(lambda: self._search.worker(command)))

    def _search_pair(self, command: ev.SearchPair) -> None:
        async def search() -> ev.RequestEvent:
            pair = await self._search.pair(command)
            if pair is None:
                return ev.SearchFailed(command.number)
            return self._pair_placed(command.number, pair)

        self._start(command.number, self._report(search))

    async def _report(self, search: Callable[[], Awaitable[ev.RequestEvent]]) -> None:
        try:
            # Called here: a task that is cancelled before it begins must leave no other coroutine.
            self._happened(await search())
        except Exception as error:  # noqa: BLE001 - it ends this request only
            self._happened(ev.CommandFailed(error))

    def _start(self, number: int, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[number] = self._loop.create_task(work, context=self._context)
        task.add_done_callback(lambda _: self._forget(number, task))

    def _forget(self, number: int, task: asyncio.Task[None]) -> None:
        # Scores that wait again have the number of those that waited before.
        if self._tasks.get(number) is task:
            del self._tasks[number]

    def _emit(self, command: ev.Emit) -> None:
        tokens, is_decoded = command
        if is_decoded and self._notes is not None:
            self._timeline.decoded()
            self._notes.record.sampled(len(tokens.token_ids))
        self.answer.tokens(tokens)
        if (finish := self.answer.stopped) is not None:
            self._happened(ev.ClientStopped(finish))

    def _emit_scores(self, command: ev.EmitScores) -> None:
        if self.answer.has_room:
            self._pass_scores(command)
        else:
            self._unread = deque()
            self._start(0, self._pass_scores_later(command))

    async def _pass_scores_later(self, command: ev.EmitScores) -> None:
        failure: Exception | None = None
        try:
            await self.answer.room()
            self._pass_scores(command)
        except Exception as error:  # noqa: BLE001 - it ends this request only
            failure = error
        unread = self._unread or ()
        self._unread = None
        if failure is not None:
            self._happened(ev.CommandFailed(failure))
        for event in unread:
            self._happened(event)

    def _pass_scores(self, command: ev.EmitScores) -> None:
        """Send scores to the client, and confirm them to the worker."""
        self.answer.scores(command.scores)
        self._streams.confirm_scores(command.number)

    def _note(self, command: ev.Note) -> None:
        if self._notes is not None:
            self._notes.reached(command)

    def _note_migration(self, command: ev.NoteMigration) -> None:
        self._timeline.migrated(command.reason, command.outcome)

    def _stop(self, end: ev.End) -> None:
        """End the request for the client."""
        admission = self._services.admission
        admission.preemption.discard(self)
        self._due_timer.close()
        if self._admitting is not None:
            self._admitting.end()
        if self._notes is not None:
            self._services.metrics.running.dec()
            num_tokens = self.answer.num_tokens
            self.work = TokenWork(self._notes.num_computed, num_tokens - self._num_resumed)
            # The deadline ends the request, even if the client's end of the call noticed first.
            is_late = self._deadline.remaining_s() <= CLOCKS_DIFFER_S
            self._notes.ended(end, num_tokens, is_late=is_late)
            if isinstance(end.error, CapacityError | UnavailableError):
                end.error.retry_after_s = admission.retry_after_s(end.error, self._request)
        if end.finish is not None:
            self.answer.finish(end.finish)
        if self._charged is not None:
            admission.settle(self._request, self._charged, self.work)
        self._conclude(end)

    def _conclude(self, end: ev.End) -> None:
        self._end = end
        if not self._ended.done():
            self._ended.set_result(None)
