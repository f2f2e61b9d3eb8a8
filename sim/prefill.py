"""A simulated prefill worker: the real scheduler and prefix cache over a pipeline that only takes
time.
"""

from dataclasses import dataclass, field
from typing import Protocol

from google.protobuf.message import Message

from engine.core.batch import ForwardBatch
from engine.core.request import SampledToken
from engine.memory.leases import PageAllocator, SlotAllocator
from engine.pipeline.results import StepResult
from pool.prefix.cache import PrefixCache
from pool.prefix.journal import PointJournal
from pool.prefix.resume_rule import ResumeRule
from pool.request.entry import Failed
from pool.tiers.block_store import Tier
from prefill.prompts import (
    FirstToken,
    PrefillEntryEvent,
    PrefillLimits,
    Started,
)
from prefill.scheduler import PrefillScheduler
from protos import prefill_pb2, transfer_pb2, types_pb2, worker_pb2
from runtime.clock import LoopClock
from runtime.errors import BatonError, DrainingError
from sim.block_sources import BlockSources, SimulatedTier
from sim.cores import Processor
from sim.intake import PromptIntake, QueuedPrompt
from sim.lengths import batch_of_lengths
from sim.links import Interface, Sending
from sim.network import Method, SimulatedCall
from sim.requests import RouterEnd, SimulatedRequest
from sim.surroundings import Surroundings
from sim.worker import COMPATIBILITY, SimulatedWorker

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
    num_tokens: int
    prompt: QueuedPrompt = field(default_factory=QueuedPrompt)
    computed: float = 0.0  # tokens whose pages can be sent
    transfer: Sending | None = None


class PrefillWorker(SimulatedWorker):
    """Simulated worker that serves `Prefill.Serve`."""

    role = "prefill"

    def __init__(
        self,
        address: str,
        around: Surroundings,
        processor: Processor,
        beside: "ChunksBeside | None" = None,
    ) -> None:
        self.interface = Interface(around.costs.network.bytes_per_s)
        self._around = around
        self._clock = LoopClock()
        self._due_s = 0.0  # added to the next chunk, for requests that began
        # In a worker of both roles: the length of chunks beside decode steps.
        self.beside: ChunksBeside | None = beside
        self._disk = SimulatedTier(around.costs.prefill.disk)
        super().__init__(address, around.costs, processor)
        around.lenders[address] = self

    @property
    def start_s(self) -> float:
        return self.costs.prefill.start_s

    @property
    def num_requests(self) -> int:
        return len(self._handlers) + self.intake.num_prompts

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

    @property
    def copies(self) -> PointJournal:
        return self._sources.copies

    @property
    def cache(self) -> PrefixCache:
        return self._scheduler.cache

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
        tiers = {Tier.HOST: SimulatedTier(mine.host), Tier.DISK: self._disk}
        self._sources = BlockSources(
            self.cache,
            self.costs,
            {kind: tier for kind, tier in tiers.items() if tier.num_pages},
            self._around.lenders,
            self.interface,
            self._scheduler.best_pace.likely_s,
            self.launch,
            self._pulled,
        )
        self.intake = PromptIntake(
            self._around,
            self._scheduler,
            self._sources,
            self.check_serving,
            self.launch,
            self._own_started,
        )
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
            lends_blocks=True,
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
            pull_cost=self._sources.pull_cost,
            copy_cost=self._sources.copy_cost,
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
        handler = _SimulatedPrefillHandler(request, len(message.open.request.prompt_token_ids))

        def received(later: prefill_pb2.PrefillInput) -> None:
            match later.WhichOneof("input"):
                case "destination":
                    self._send_to(handler, later.destination)
                case "release":  # decode has committed
                    request.end()
                    self._release(handler)

        request.on_input, request.on_gone = received, lambda: self._release(handler)

        def was_queued() -> None:
            self._handlers[handler.prompt.key] = handler

        try:
            self.intake.enter(
                handler.prompt,
                message.open.request,
                message.open.holder.address,
                lambda event: self._happened(handler, event),
                was_queued,
            )
        except BatonError as error:
            request.end(error)
            return
        self._woken()

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
                            terms=terms,
                            queue_s=event.queue_s,
                            cached_tokens=event.num_cached,
                            **handler.prompt.brought.counts(event.num_cached),
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
        arrival = self._around.arrivals.get((destination.session_id, destination.epoch))
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
        handler.prompt.cancel()
        if self._handlers.pop(handler.prompt.key, None) is not None:
            self._scheduler.release(handler.prompt.key)
            self.launch()

    def _own_started(self) -> None:
        self._due_s += self.costs.prefill.request_s

    def _pulled(self, num_bytes: float) -> None:
        self.num_received_bytes += num_bytes

    def launch(self) -> None:
        """Launch chunks while a stage is free, unless the process has ended."""
        while self.server.is_up and self._num_in_flight < self.costs.prefill.stages:
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
        self.launch()

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
