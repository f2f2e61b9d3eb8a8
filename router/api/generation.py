"""`baton.v1.Generation`: checks what comes in, starts a flow per request, and hands out what it
emits.

Several choices of one request: each is a request of its own to the workers, and all share one
stream. They begin together and fail together: the first error ends the others. Choice i draws with
a seed derived from the request's, so that every choice is repeatable alone.
"""

import asyncio
import hashlib
import secrets
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import grpc

from protos import generation_pb2, generation_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc
from router.api.load import RequestCounts, load_of
from router.request.answer import Answer, Output, ResponseQueue, feed
from router.request.flow import RequestFlow, Services
from router.request.service_times import Timeline
from router.request.validate import AdmissibleRequest, PriorityLimits, admissible, resolved_sampling
from router.request.worker_stream import task_group
from router.text.model_facts import ModelLimits, ServedModel
from router.workers.report import without_addresses
from router.workers.worker import Worker
from runtime.clock import Clock
from runtime.errors import DuplicateRequestError, FieldViolation, InvalidRequestError
from runtime.observe.log import rebind
from runtime.observe.tracing import note
from runtime.security.access import ANYBODY, Caller

Context = grpc.aio.ServicerContext[Any, Any]
MAX_ABORT_IDS = 1024
FLUSH_TIMEOUT_S = 5.0  # for each worker: between two steps of its engine
# 2^64 divided by the golden ratio: seeds of neighbouring requests do not meet (Knuth, TAOCP 3,
# section 6.4).
SEED_STRIDE = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class RequestKey:
    """Ids are a client's own: another one's may be the same, and cannot be guessed away."""

    owner: str
    request_id: str


@dataclass(frozen=True)
class RequestLimits:
    """`max_request_s` holds for clients that set no deadline; `client_stall_s` for those that stop
    reading; `priorities` for those that push ahead. `salts_by_client`: clients share cached prompts
    with themselves alone."""

    max_request_s: float
    client_stall_s: float
    priorities: PriorityLimits = field(default_factory=PriorityLimits)
    salts_by_client: bool = False


class GenerationService(generation_pb2_grpc.GenerationServicer):
    """The public API. `runtime.rpc.interceptor` turns the errors it raises into statuses."""

    def __init__(
        self,
        model: ServedModel,
        services: Services,
        limits: RequestLimits,
        clock: Clock,
        caller_of: Callable[[Context], Caller] = lambda _: ANYBODY,
    ) -> None:
        self._model = model
        self._caller_of = caller_of
        self._services = services
        self._limits = limits
        self._clock = clock
        self.counts = RequestCounts()
        self._running: dict[RequestKey, tuple[RequestFlow, ...]] = {}  # a flow per choice

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        timeline = Timeline(self._clock, self._services.metrics)
        # The router's own, where the client chose none: refused requests are looked up in the log,
        # too.
        request_id = request.request_id or uuid.uuid4().hex
        rebind(request_id=request_id)
        caller = self._caller_of(context)
        checked = await admissible(
            request,
            self._facts(),
            self._model.tokeniser,
            draw_seed,
            self._model.grammars,
            most_urgent=self._limits.priorities.most_urgent(caller),
            client=caller.account,
        )
        checked.engine.request_id = request_id
        if self._limits.salts_by_client:
            checked.engine.cache_salt = client_salt(caller.identity, request.cache_salt)
        outputs = [await self._output(checked, index) for index in range(checked.num_choices)]
        responses = ResponseQueue(self._limits.client_stall_s)
        key = self._register(checked, outputs, responses, timeline, context, caller)
        flows = self._running[key]
        task = asyncio.create_task(flows[0].run() if len(flows) == 1 else run_together(flows))
        # By callback, because this handler may be cancelled at any await, more than once.
        task.add_done_callback(lambda ended: self._ended(key, responses, ended))
        try:
            async for response in responses:
                yield response
            await task
        finally:
            # A client that left is an abort; the workers' streams are closed when the task is over.
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def Abort(
        self, request: generation_pb2.AbortRequest, context: Context
    ) -> generation_pb2.AbortResponse:
        if (count := len(request.request_ids)) > MAX_ABORT_IDS:
            raise InvalidRequestError(
                FieldViolation("request_ids", f"has {count} entries, the limit is {MAX_ABORT_IDS}")
            )
        owner = self._caller_of(context).identity
        keys = [RequestKey(owner, request_id) for request_id in dict.fromkeys(request.request_ids)]
        known = [key for key in keys if key in self._running]
        for key in known:
            for flow in self._running[key]:
                flow.abort()
        return generation_pb2.AbortResponse(aborted=[key.request_id for key in known])

    async def GetModelInfo(
        self, request: generation_pb2.GetModelInfoRequest, context: Context
    ) -> generation_pb2.GetModelInfoResponse:
        facts, tokeniser = self._facts(), self._model.tokeniser
        return generation_pb2.GetModelInfoResponse(
            model=facts.name,
            architecture=facts.architecture,
            vocab_size=facts.vocab_size,
            max_context_tokens=facts.max_context_tokens,
            num_layers=facts.num_layers,
            eos_token_ids=facts.eos_token_ids,
            has_tokenizer=tokeniser is not None,
            has_chat_template=tokeniser is not None and tokeniser.has_chat_template,
            revision=self._services.directory.revision,
            default_sampling=resolved_sampling(types_pb2.SamplingParams(), facts),
        )

    async def GetLoad(
        self, request: generation_pb2.GetLoadRequest, context: Context
    ) -> generation_pb2.GetLoadResponse:
        return self.load()

    def load(self) -> generation_pb2.GetLoadResponse:
        return load_of(self._services.directory.workers, self._services.admission.num_waiting)

    @property
    def default_sampling(self) -> Mapping[str, float]:
        """What the model's files state of how its tokens are drawn, by field."""
        return self._model.facts.sampling

    @property
    def num_active(self) -> int:
        """Choices under way, those held back included."""
        return sum(len(flows) for flows in self._running.values())

    def problem(self) -> str:
        """Why no request could be served now, for clients; empty if one could."""
        return self._services.directory.refusal()

    async def GetClusterStatus(
        self, request: generation_pb2.GetClusterStatusRequest, context: Context
    ) -> generation_pb2.GetClusterStatusResponse:
        num_waiting = self._services.admission.num_waiting
        workers = self._services.directory.status()
        if not self._caller_of(context).is_operator:
            workers = without_addresses(workers)
        return generation_pb2.GetClusterStatusResponse(
            model=self._model.facts.name,
            waiting_requests=num_waiting,
            running_requests=max(0, self.num_active - num_waiting),
            workers=workers,
        )

    async def FlushCaches(
        self, request: generation_pb2.FlushCachesRequest, context: Context
    ) -> generation_pb2.FlushCachesResponse:
        flushed = await asyncio.gather(
            *(_flush(worker) for worker in self._services.directory.workers)
        )
        return generation_pb2.FlushCachesResponse(workers=flushed)

    def _facts(self) -> ModelLimits:
        return replace(
            self._model.facts, max_context_tokens=self._services.directory.max_context_tokens
        )

    def _register(
        self,
        checked: AdmissibleRequest,
        outputs: Sequence[Output],
        responses: ResponseQueue,
        timeline: Timeline,
        context: Context,
        caller: Caller,
    ) -> RequestKey:
        """Make a flow per choice; returns what they run under."""
        engine = checked.engine
        note(request_id=engine.request_id, prompt_tokens=len(engine.prompt_token_ids))
        key = RequestKey(caller.identity, engine.request_id)
        if key in self._running:
            raise DuplicateRequestError(f"request_id: {engine.request_id!r} is running already")
        self._services.metrics.prompt_tokens.inc(checked.num_choices * len(engine.prompt_token_ids))
        remaining_s = cast(
            "float | None", context.time_remaining()
        )  # None without a deadline; typed as a float
        limit_s = self._limits.max_request_s
        limit_s = limit_s if remaining_s is None else min(remaining_s, limit_s)
        self.counts.accepted += 1
        self._running[key] = tuple(
            RequestFlow(
                choice_of(checked, index),
                Answer(
                    engine.request_id,
                    index,
                    output,
                    responses,
                    timeline.sibling() if index else timeline,
                    checked.resumed_of(index),
                ),
                self._services,
                limit_s,
            )
            for index, output in enumerate(outputs)
        )
        return key

    async def _output(self, checked: AdmissibleRequest, index: int) -> Output:
        """Of choice `index`, with what its client has. Raises InvalidRequestError for what it
        cannot have."""
        tokeniser = self._model.tokeniser
        detokeniser = None
        if tokeniser is not None and checked.wants_text:
            detokeniser = tokeniser.detokenisers.new(checked.engine.prompt_token_ids)
        output = Output(checked.engine, checked.stop_strings, detokeniser)
        await feed(output, checked.resumed_of(index), checked.engine, index)
        return output

    def _ended(self, key: RequestKey, responses: ResponseQueue, task: "asyncio.Task[None]") -> None:
        self.counts.failed += not task.cancelled() and task.exception() is not None
        del self._running[key]
        responses.close()


def client_salt(identity: str, salt: str) -> str:
    """What stands for a client and the salt it gave: the same at every router, and no salt of
    another client."""
    return hashlib.blake2b(f"{len(identity)}:{identity}{salt}".encode(), digest_size=16).hexdigest()


async def _flush(worker: Worker) -> generation_pb2.FlushedCache:
    flushed = generation_pb2.FlushedCache(role=worker.role, address=worker.address)
    try:
        response = await worker_pb2_grpc.WorkerStub(worker.channel).FlushCache(
            worker_pb2.FlushCacheRequest(), timeout=FLUSH_TIMEOUT_S
        )
        flushed.pages = response.pages
    except grpc.aio.AioRpcError as error:
        flushed.error = error.details() or error.code().name
    return flushed


def draw_seed() -> int:
    """A seed for a request that brings none."""
    return secrets.randbits(64)


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index`; that of choice 0 is the request's own."""
    return (seed + index * SEED_STRIDE) % 2**64


def choice_of(request: AdmissibleRequest, index: int) -> AdmissibleRequest:
    """Choice `index` as a request of its own. The prompt is scored for choice 0 only: it is the
    same for all."""
    if index == 0:
        return request
    engine = types_pb2.EngineRequest()
    engine.CopyFrom(request.engine)
    engine.request_id = f"{engine.request_id}/{index}"
    engine.sampling.seed = choice_seed(engine.sampling.seed, index)
    engine.ClearField("num_prompt_logprobs")
    return replace(
        request,
        engine=engine,
        resumed=request.resumed[index : index + 1],
        resumed_from=request.resumed_from[index : index + 1],
    )


async def run_together(flows: Sequence[RequestFlow]) -> None:
    """Every flow to its end. Raises the first BatonError, when the others have been cancelled."""
    async with task_group() as group:
        for flow in flows:
            group.create_task(flow.run())
