"""A simulated prefill worker: the real scheduler and prefix cache over a pipeline that only takes
time.
"""

from dataclasses import dataclass
from functools import partial
from typing import Protocol

from google.protobuf.message import Message

from engine.core.batch import ForwardBatch
from engine.core.request import Request, SampledToken
from engine.memory.leases import PageAllocator, SlotAllocator
from engine.pipeline.results import StepResult
from pool.prefix.journal import PointJournal
from pool.prefix.resume_rule import ResumeRule
from pool.request.entry import Failed
from prefill.prompts import (
    FirstToken,
    PrefillEmitter,
    PrefillEntryEvent,
    PrefillLimits,
    PromptMemory,
    Started,
)
from prefill.scheduler import PrefillScheduler
from protos import prefill_pb2, transfer_pb2, types_pb2, worker_pb2
from runtime.clock import LoopClock
from runtime.errors import BatonError, DrainingError
from sim.cores import Processor
from sim.costs import Costs
from sim.lengths import batch_of_lengths
from sim.links import ArrivalTable, Interface, Sending
from sim.network import Method, SimulatedCall
from sim.requests import RouterEnd, SimulatedRequest
from sim.worker import COMPATIBILITY, SimulatedPrompts, SimulatedWorker

FIRST_TOKEN = 1  # of every response


class ChunksBeside(Protocol):
    """The decode steps that chunks of a worker of both roles alternate with."""

    def budget_tokens(self, most: int) -> int:
        """Return the most tokens of the next chunk, at most `most`."""

    def may_start(self) -> bool:
        """Return whether another prompt may take memory now."""

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Record the duration of a chunk."""


PrefillRequest = SimulatedRequest[prefill_pb2.PrefillInput, prefill_pb2.PrefillEvent]


@dataclass(eq=False)
class _SimulatedPrefillHandler:
    """One request on this worker, to its end."""

    request: PrefillRequest
    key: int = 0
    num_tokens: int = 0
    computed: float = 0.0  # tokens whose pages can be sent
    transfer: Sending | None = None


class PrefillWorker(SimulatedWorker):
    """Simulated worker that serves `Prefill.Serve`."""

    role = "prefill"

    def __init__(
        self,
        address: str,
        costs: Costs,
        arrivals: ArrivalTable,
        prompts: SimulatedPrompts,
        processor: Processor,
        beside: "ChunksBeside | None" = None,
    ) -> None:
        self.interface = Interface(costs.network.bytes_per_s)
        self._arrivals = arrivals
        self._prompts = prompts
        self._clock = LoopClock()
        self._due_s = 0.0  # added to the next chunk, for requests that began
        # In a worker of both roles: the length of chunks beside decode steps.
        self.beside: ChunksBeside | None = beside
        super().__init__(address, costs, processor)

    @property
    def start_s(self) -> float:
        return self.costs.prefill.start_s

    @property
    def num_requests(self) -> int:
        return len(self._handlers) + len(self._own)

    @property
    def queued_tokens(self) -> int:
        """Return the uncomputed tokens of the prompts on this worker."""
        return self._scheduler.load().queued_tokens

    def check(self) -> None:
        if self.num_tokens:  # otherwise the worker was never used
            self._scheduler.on_idle()

    def drain(self) -> None:
        super().drain()
        for handler in tuple(self._handlers.values()):
            handler.request.end(DrainingError("the prefill worker drains"))
            self._release(handler)

    def read(self, message: types_pb2.EngineRequest, emit: PrefillEmitter) -> int:
        """Queue a prompt that will be decoded here, too; return its key.

        Raises:
            BatonError: it is rejected.
        """
        self.check_serving()
        key = self._scheduler.submit(
            self._request_of(message),
            partial(self._own_event, emit),
            blocks=self._blocks_of(message),
        )
        self._own.add(key)
        self._woken()
        self._launch()
        return key

    def num_cached(self, message: types_pb2.EngineRequest) -> int:
        """Return the number of cached tokens of a prompt."""
        blocks = self._blocks_of(message)
        return self._scheduler.cache.find(blocks, len(message.prompt_token_ids)).num_tokens

    def hand_over(self, key: int) -> PromptMemory:
        """Return the memory of a computed prompt that was queued by `read`."""
        self._own.discard(key)
        return self._scheduler.hand_over(key)

    def give_up(self, key: int) -> None:
        """Release a prompt that was queued by `read`. Idempotent."""
        if key in self._own:
            self._own.discard(key)
            self._scheduler.release(key)
            if self.server.is_up:
                self._launch()

    def _own_event(self, emit: PrefillEmitter, event: PrefillEntryEvent) -> None:
        if isinstance(event, Started):
            self._due_s += self.costs.prefill.request_s
        emit(event)

    @property
    def pages(self) -> PageAllocator:
        return self._scheduler.pages

    def die(self) -> None:
        super().die()
        self._num_starts += 1  # invalidates results still in the pipeline

    def _begin(self) -> PointJournal:
        model = self.costs.model
        mine = self.costs.prefill
        limits = PrefillLimits(
            model.page_size, mine.chunk_tokens, mine.grid, mine.max_running, mine.max_queued
        )
        num_pages = mine.num_pages if self.beside is None else self.costs.decode.num_pages
        self._scheduler = PrefillScheduler(
            PageAllocator(num_pages + 1),
            SlotAllocator(mine.num_slots + 1 if mine.num_slots else 0),
            limits,
            self._clock,
            ResumeRule(model.page_size, mine.grid, has_states=mine.num_slots > 0),
            batch_of_lengths,
        )
        if self.beside is not None:
            self._scheduler.budget_tokens = self.beside.budget_tokens
            self._scheduler.may_start = self.beside.may_start
        self._handlers: dict[int, _SimulatedPrefillHandler] = {}
        self._own: set[int] = set()  # prompts that will be decoded here, too
        self._stage_free_s = [0.0] * mine.stages
        self._num_in_flight = 0
        return self._scheduler.cache.journal

    def _methods(self) -> dict[str, Method]:
        return {"/baton.v1.Prefill/Serve": self._serve}

    def _described(self) -> worker_pb2.WorkerInfo:
        mine = self.costs.prefill
        return worker_pb2.WorkerInfo(
            pages_total=self._scheduler.pages.num_total,
            slots_total=mine.num_slots,
            max_running_requests=mine.max_running,
            max_batch_requests=mine.max_running,
            max_queued_requests=mine.max_queued,
        )

    def _reported(self, *, serving: bool, reason: str) -> worker_pb2.WorkerLoad:
        load = self._scheduler.load()
        return worker_pb2.WorkerLoad(
            serving=serving,
            reason=reason,
            start_s=self.costs.prefill.start_s,
            queued_requests=load.queued_requests,
            queued_tokens=load.queued_tokens,
            pages_free=load.pages_free,
            running_requests=load.running_requests,
            slots_free=load.slots_free,
            prompt_tokens=self.num_tokens,
        )

    def _serve(self, call: SimulatedCall) -> None:
        end: RouterEnd[prefill_pb2.PrefillInput, prefill_pb2.PrefillEvent] = RouterEnd(
            call,
            lambda event: prefill_pb2.PrefillEvents(events=[event]),
            lambda key, ended: prefill_pb2.PrefillEvent(key=key, ended=ended),
            self._opened,
        )

        def received(message: Message) -> None:
            assert isinstance(message, prefill_pb2.PrefillInputs)
            for item in message.inputs:
                end.received(item)

        call.on_message = received

    def _opened(self, request: PrefillRequest, message: prefill_pb2.PrefillInput) -> None:
        handler = _SimulatedPrefillHandler(request)

        def received(later: prefill_pb2.PrefillInput) -> None:
            match later.WhichOneof("input"):
                case "destination":
                    self._send_to(handler, later.destination)
                case "release":  # decode has committed
                    request.end()
                    self._release(handler)

        request.on_input, request.on_gone = received, lambda: self._release(handler)
        self._submit(handler, message.open.request)

    def _submit(self, handler: _SimulatedPrefillHandler, message: types_pb2.EngineRequest) -> None:
        handler.num_tokens = len(message.prompt_token_ids)
        try:
            self.check_serving()
            handler.key = self._scheduler.submit(
                self._request_of(message),
                lambda event: self._happened(handler, event),
                blocks=self._blocks_of(message),
            )
        except BatonError as error:
            handler.request.end(error)
            return
        self._handlers[handler.key] = handler
        self._woken()
        self._launch()

    def _request_of(self, message: types_pb2.EngineRequest) -> Request:
        return Request(
            message.request_id,
            range(len(message.prompt_token_ids)),
            message.max_tokens,
            priority=message.priority,
        )

    def _blocks_of(self, message: types_pb2.EngineRequest) -> tuple[bytes, ...]:
        """Return the request's block names; none after its client has gone."""
        prompt = self._prompts.get(message.request_id)
        return () if prompt is None else prompt.page_names(self.costs.model.page_size)

    def _happened(self, handler: _SimulatedPrefillHandler, event: PrefillEntryEvent) -> None:
        match event:
            case Started():
                handler.computed = event.num_cached
                self._due_s += self.costs.prefill.request_s
                terms = transfer_pb2.SourceTerms(
                    compatibility=COMPATIBILITY,
                    num_tokens=handler.num_tokens,
                    page_size=self.costs.model.page_size,
                )
                handler.request.send(
                    prefill_pb2.PrefillEvent(
                        started=prefill_pb2.PrefillStarted(
                            terms=terms, queue_s=event.queue_s, cached_tokens=event.num_cached
                        )
                    )
                )
            case FirstToken():
                handler.request.send(
                    prefill_pb2.PrefillEvent(
                        first_token=prefill_pb2.PrefillFirstToken(
                            token=types_pb2.TokenChunk(token_ids=[FIRST_TOKEN]),
                            prefill_s=event.prefill_s,
                        )
                    )
                )
            case Failed(error):
                handler.request.end(error)
                self._release(handler)

    def _send_to(
        self, handler: _SimulatedPrefillHandler, destination: transfer_pb2.DestinationTerms
    ) -> None:
        """Send pages to a decode pool that has reserved, beginning with those already computed."""
        arrival = self._arrivals.get((destination.session_id, destination.epoch))
        if arrival is None:  # the reservation has ended meanwhile
            return
        num_bytes = self.costs.handoff_bytes(handler.num_tokens)

        def arrived() -> None:
            arrival.on_received()
            handler.request.send(
                prefill_pb2.PrefillEvent(sent=prefill_pb2.PrefillSent(num_bytes=round(num_bytes)))
            )

        handler.transfer = Sending(self.interface, arrival.interface, num_bytes, arrived)
        handler.transfer.release(num_bytes * handler.computed / handler.num_tokens)

    def _release(self, handler: _SimulatedPrefillHandler) -> None:
        if handler.transfer is not None:
            handler.transfer.cancel()
        if self._handlers.pop(handler.key, None) is not None:
            self._scheduler.release(handler.key)
            if self.server.is_up:
                self._launch()

    def _launch(self) -> None:
        """Launch chunks while a stage is free."""
        while self._num_in_flight < self.costs.prefill.stages:
            batch = self._scheduler.next_batch()
            self.processor.compute(is_computing=batch is not None or self._num_in_flight > 0)
            if batch is None:
                return
            self._num_in_flight += 1
            began_s, ends_s = self._passes(batch)
            self.processor.call_at(
                (began_s + ends_s) / 2, self._half_computed, batch, self._num_starts
            )
            self.processor.call_at(ends_s, self._computed, batch, self._num_starts)

    def _passes(self, batch: ForwardBatch) -> tuple[float, float]:
        """Return when a chunk begins on the first stage and leaves the last, in processor time."""
        mine = self.costs.prefill
        lengths = list(zip(batch.query_lens, batch.context_lens, strict=True))
        pairs = sum(count * (context + (count + 1) / 2) for count, context in lengths)
        stage_s = (mine.chunk_s(sum(batch.query_lens), pairs) + self._due_s) / mine.stages
        self._due_s = 0.0
        if self.beside is not None:
            self.beside.computed(sum(batch.query_lens), stage_s)
        self.busy_s += stage_s
        at_s = began_s = max(self.processor.now(), self._stage_free_s[0])
        for stage, free_s in enumerate(self._stage_free_s):
            at_s = self._stage_free_s[stage] = max(at_s, free_s) + stage_s
        return began_s, at_s

    def _half_computed(self, batch: ForwardBatch, start: int) -> None:
        """Release pages of a chunk for sending.

        Layers are sent as they are computed: on average half a chunk before its end, except for the
        last layer.
        """
        if start == self._num_starts:
            share = 1 - 1 / self.costs.model.num_layers
            for key, count, context in zip(
                batch.request_keys, batch.query_lens, batch.context_lens, strict=True
            ):
                self._can_leave(key, context + count * share)

    def _computed(self, batch: ForwardBatch, start: int) -> None:
        if start != self._num_starts:
            return
        self._num_in_flight -= 1
        self.num_tokens += sum(batch.query_lens)
        for key, count, context in zip(
            batch.request_keys, batch.query_lens, batch.context_lens, strict=True
        ):
            self._can_leave(key, context + count)
        tokens = [SampledToken(FIRST_TOKEN) for sampling in batch.sampling if sampling is not None]
        self._scheduler.on_result(batch, StepResult(0, tokens))
        self._launch()

    def _can_leave(self, key: int, num_tokens: float) -> None:
        handler = self._handlers.get(key)
        if handler is None:
            return
        more = num_tokens - handler.computed
        handler.computed = num_tokens
        if handler.transfer is not None:
            handler.transfer.release(
                self.costs.handoff_bytes(handler.num_tokens) * more / handler.num_tokens
            )
