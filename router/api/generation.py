"""`baton.v1.Generation`: checks what comes in, starts a flow per request, and hands out what it emits."""

import asyncio
import secrets
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any, cast

import grpc

from protos import generation_pb2, generation_pb2_grpc
from router.api.load import RequestCounts, load_of
from router.request.choices import choice_of, emit_into, run_together
from router.request.flow import Flow, Services
from router.request.output import Output
from router.request.response_queue import Outbox
from router.request.timeline import Timeline
from router.request.validate import AdmissibleRequest, admissible
from router.text.model_facts import ModelFacts, ServedModel
from runtime.clock import Clock
from runtime.errors import DuplicateRequestError
from runtime.log import rebind
from runtime.tracing import note

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True)
class RequestLimits:
    """`max_request_s` holds for clients that set no deadline; `client_stall_s` for those that stop reading."""

    max_request_s: float
    client_stall_s: float


class GenerationService(generation_pb2_grpc.GenerationServicer):
    """The public API. `runtime.interceptor` turns the errors it raises into statuses."""

    def __init__(self, model: ServedModel, services: Services, limits: RequestLimits, clock: Clock) -> None:
        self._model = model
        self._services = services
        self._limits = limits
        self._clock = clock
        self.counts = RequestCounts()
        self._running: dict[str, tuple[Flow, ...]] = {}  # a flow per choice

    async def Generate(self, request: generation_pb2.GenerateRequest,
                       context: Context) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        timeline = Timeline(self._clock, self._services.metrics)
        rebind(request_id=request.request_id)
        checked = await admissible(request, self._facts(), self._model.tokeniser, draw_seed,
                                   self._model.grammars)
        outbox = Outbox(self._limits.client_stall_s)
        request_id = self._register(checked, outbox, timeline, context)
        task = asyncio.create_task(run_together(self._running[request_id]))
        # By callback, because this handler may be cancelled at any await, more than once.
        task.add_done_callback(lambda ended: self._ended(request_id, outbox, ended))
        try:
            async for response in outbox:
                yield response
            await task
        finally:
            # A client that left is an abort; the workers' streams are closed when the task is over.
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def Abort(self, request: generation_pb2.AbortRequest,
                    context: Context) -> generation_pb2.AbortResponse:
        known = [request_id for request_id in dict.fromkeys(request.request_ids) if request_id in self._running]
        for request_id in known:
            for flow in self._running[request_id]:
                flow.abort()
        return generation_pb2.AbortResponse(aborted=known)

    async def GetModelInfo(self, request: generation_pb2.GetModelInfoRequest,
                           context: Context) -> generation_pb2.GetModelInfoResponse:
        facts, tokeniser = self._facts(), self._model.tokeniser
        return generation_pb2.GetModelInfoResponse(
            model=facts.name, architecture=facts.architecture, vocab_size=facts.vocab_size,
            max_context_tokens=facts.max_context_tokens, num_layers=facts.num_layers,
            eos_token_ids=facts.eos_token_ids, has_tokenizer=tokeniser is not None,
            has_chat_template=tokeniser is not None and tokeniser.has_chat_template,
            revision=self._services.directory.revision)

    async def GetLoad(self, request: generation_pb2.GetLoadRequest,
                      context: Context) -> generation_pb2.GetLoadResponse:
        return self.load()

    def load(self) -> generation_pb2.GetLoadResponse:
        return load_of(self._services.directory.workers, self._services.admission.num_waiting)

    @property
    def num_active(self) -> int:
        """Choices under way, those held back included."""
        return sum(len(flows) for flows in self._running.values())

    def problem(self) -> str:
        """Why no request could be served now, for clients; empty if one could."""
        return self._services.directory.refusal()

    async def GetClusterStatus(self, request: generation_pb2.GetClusterStatusRequest,
                               context: Context) -> generation_pb2.GetClusterStatusResponse:
        num_waiting = self._services.admission.num_waiting
        return generation_pb2.GetClusterStatusResponse(
            model=self._model.facts.name, waiting_requests=num_waiting,
            running_requests=max(0, self.num_active - num_waiting), workers=self._services.directory.status())

    def _facts(self) -> ModelFacts:
        return replace(self._model.facts, max_context_tokens=self._services.directory.max_context_tokens)

    def _register(self, checked: AdmissibleRequest, outbox: Outbox, timeline: Timeline, context: Context) -> str:
        """Make a flow per choice; returns the id they run under."""
        engine = checked.engine
        engine.request_id = engine.request_id or uuid.uuid4().hex
        rebind(request_id=engine.request_id)
        note(request_id=engine.request_id, prompt_tokens=len(engine.prompt_token_ids))
        if engine.request_id in self._running:
            raise DuplicateRequestError(f"request_id: {engine.request_id!r} is running already")
        self._services.metrics.prompt_tokens.inc(checked.num_choices * len(engine.prompt_token_ids))
        remaining_s = cast("float | None", context.time_remaining())  # None without a deadline; typed as a float
        limit_s = self._limits.max_request_s
        limit_s = limit_s if remaining_s is None else min(remaining_s, limit_s)
        self.counts.accepted += 1
        self._running[engine.request_id] = tuple(
            Flow(choice_of(checked, index), self._output(checked), emit_into(outbox, engine.request_id, index),
                 timeline.sibling() if index else timeline, self._services, limit_s)
            for index in range(checked.num_choices))
        return engine.request_id

    def _output(self, checked: AdmissibleRequest) -> Output:
        tokeniser = self._model.tokeniser
        detokeniser = tokeniser.detokenisers.new() if tokeniser is not None and checked.wants_text else None
        return Output(checked.engine, checked.stop_strings, detokeniser)

    def _ended(self, request_id: str, outbox: Outbox, task: "asyncio.Task[None]") -> None:
        self.counts.failed += not task.cancelled() and task.exception() is not None
        del self._running[request_id]
        outbox.close()


def draw_seed() -> int:
    """A seed for a request that brings none."""
    return secrets.randbits(64)
