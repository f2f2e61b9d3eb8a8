"""`baton.v1.Generation`: validates requests, starts a flow for each, and streams its responses."""

import asyncio
import hashlib
import secrets
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import grpc

from protos import generation_pb2, generation_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc
from router.api.load import RequestCounts, load_of
from router.request.answer import Answer, Output, ResponseQueue
from router.request.cache_hints import SESSION_KEYS, cache_session, outcomes, session_named
from router.request.choices import choice_of, run_together
from router.request.client_limits import ClientLimits, LimitsFile, NamedLimits
from router.request.flow import RequestFlow, Services
from router.request.priorities import PriorityLimits
from router.request.quotas import ClientQuotas, QuotaCharge, QuotaHold
from router.request.request_log import RequestLog, ended, refused
from router.request.resumption import feed
from router.request.timeline import Timeline
from router.request.validate import AdmissibleRequest, admissible, resolved_sampling
from router.text.model_facts import ModelLimits, ServedModel
from router.workers.report import without_addresses
from router.workers.worker import Worker
from runtime.clock import Clock
from runtime.errors import BatonError, DuplicateRequestError, FieldViolation, InvalidRequestError
from runtime.observe.log import rebind
from runtime.observe.tracing import note
from runtime.rpc.unknown_fields import unknown_fields
from runtime.security.access import ANYBODY, Caller

Context = grpc.aio.ServicerContext[Any, Any]
MAX_ABORT_IDS = 1024
NEW_SEED = partial(secrets.randbits, 64)  # of a request without one
FLUSH_TIMEOUT_S = 5.0  # per worker, which flushes between two steps of its engine


@dataclass(frozen=True)
class RequestKey:
    """Key of a running request. Ids are scoped by client: two clients may use the same one."""

    owner: str
    request_id: str


@dataclass(frozen=True)
class GenerateCall:
    """One call of `Generate`, from its arrival; `request_id` is the client's, or else chosen."""

    request_id: str
    caller: Caller
    context: Context
    timeline: Timeline
    responses: ResponseQueue


@dataclass(frozen=True)
class RequestLimits:
    """Limits of requests.

    `max_request_s` applies to clients that set no deadline, `client_stall_s` to clients that stop
    reading, `priorities` bounds requested priorities. With `salts_by_client` a client shares cached
    prompts only with itself.
    """

    max_request_s: float
    client_stall_s: float
    priorities: PriorityLimits = field(default_factory=PriorityLimits)
    salts_by_client: bool = False
    clients: LimitsFile | None = None


class GenerationService(generation_pb2_grpc.GenerationServicer):
    """The public API. `runtime.rpc.interceptor` turns the errors it raises into statuses."""

    def __init__(
        self,
        model: ServedModel,
        services: Services,
        limits: RequestLimits,
        clock: Clock,
        caller_of: Callable[[Context], Caller] = lambda _: ANYBODY,
        request_log: RequestLog | None = None,
    ) -> None:
        self._model = model
        self._caller_of = caller_of
        self._services = services
        self._limits = limits
        self._clock = clock
        self._log = request_log
        self.counts = RequestCounts()
        self._quotas = ClientQuotas(clock, services.client_metrics)
        self._running: dict[RequestKey, tuple[RequestFlow, ...]] = {}  # a flow for each choice

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        timeline = Timeline(self._clock, self._services.metrics)
        # The router chooses an id if the client did not: rejected requests are looked up in the
        # log, too.
        request_id = request.request_id or uuid.uuid4().hex
        rebind(request_id=request_id)
        caller = self._caller_of(context)
        responses = ResponseQueue(self._limits.client_stall_s)
        call = GenerateCall(request_id, caller, context, timeline, responses)
        try:
            task = await self._start(request, call)
        except BatonError as error:
            if self._log is not None:
                self._log.write(refused(request_id, caller, timeline, error))
            raise
        try:
            async for response in responses:
                yield response
            await task
        finally:
            # A client that left aborts its request; the workers' streams close when the task ends.
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _start(
        self, request: generation_pb2.GenerateRequest, call: GenerateCall
    ) -> "asyncio.Task[None]":
        """Check a request, reserve its quota, and return the task that answers it.

        Raises:
            BatonError: the request is refused.
        """
        caller = call.caller
        named = self._limits_of(caller)
        checked = await admissible(
            request,
            self._facts(),
            self._model.text_tokenizer,
            NEW_SEED,
            self._model.grammars,
            most_urgent=self._limits.priorities.most_urgent(caller),
            client=caller.account,
        )
        checked = replace(checked, weight=named.limits.weight)
        checked.engine.request_id = call.request_id
        if self._limits.salts_by_client:
            checked.engine.cache_salt = client_salt(caller.identity, request.cache_salt)
        self._set_session(checked.engine, request, call)
        if caller.identity:
            checked.engine.share.CopyFrom(named.limits.share_of(caller.account))
        outputs = [await self._output(checked, index) for index in range(checked.num_choices)]
        hold = self._quotas.reserve(caller.account, named, self._charge(checked, named.limits))
        try:
            key = self._register(checked, outputs, call)
        except BaseException:
            hold.settle(QuotaCharge())
            raise
        flows = self._running[key]
        task = asyncio.create_task(flows[0].run() if len(flows) == 1 else run_together(flows))
        # In a callback, because the handler may be cancelled at any await, and more than once.
        task.add_done_callback(lambda done: self._ended(key, hold, checked, call, done))
        return task

    def _set_session(
        self,
        engine: types_pb2.EngineRequest,
        request: generation_pb2.GenerateRequest,
        call: GenerateCall,
    ) -> None:
        """Name the session of a request for the workers, as its hints ask."""
        metadata = dict(call.context.invocation_metadata() or ())
        is_named = request.session_id or any(key in metadata for key in SESSION_KEYS)
        if not is_named and not request.HasField("kv_hints"):
            return
        hints, found = outcomes(request.kv_hints)
        for action, outcome in found:
            self._services.metrics.kv_hints.labels(action, outcome).inc()
        session = cache_session(
            session_named(request, metadata),
            hints,
            client=call.caller.account,
            salt=engine.cache_salt,
            request_id=engine.request_id,
        )
        if session is not None:
            engine.session.CopyFrom(session)

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
        facts = self._facts()
        text_tokenizer = self._model.text_tokenizer
        return generation_pb2.GetModelInfoResponse(
            model=facts.name,
            architecture=facts.architecture,
            vocab_size=facts.vocab_size,
            max_context_tokens=facts.max_context_tokens,
            num_layers=facts.num_layers,
            eos_token_ids=facts.eos_token_ids,
            has_tokenizer=text_tokenizer is not None,
            has_chat_template=text_tokenizer is not None and text_tokenizer.has_chat_template,
            revision=self._services.directory.revision,
            default_sampling=resolved_sampling(types_pb2.SamplingParams(), facts),
            adapters=list(facts.adapters.offered),
        )

    async def GetLoad(
        self, request: generation_pb2.GetLoadRequest, context: Context
    ) -> generation_pb2.GetLoadResponse:
        return self.load()

    def load(self) -> generation_pb2.GetLoadResponse:
        return load_of(self._services.directory.workers, self._services.admission.num_waiting)

    @property
    def default_sampling(self) -> Mapping[str, float]:
        """Return the sampling defaults in the model's files, by field."""
        return self._model.facts.sampling

    @property
    def num_active(self) -> int:
        """Return the number of active choices, queued ones included."""
        return sum(len(flows) for flows in self._running.values())

    def problem(self) -> str:
        """Return why no request could be served now, in a form for clients; empty if one could."""
        return self._services.directory.refusal()

    async def GetClusterStatus(
        self, request: generation_pb2.GetClusterStatusRequest, context: Context
    ) -> generation_pb2.GetClusterStatusResponse:
        return self.cluster_status(for_operators=self._caller_of(context).is_operator)

    def cluster_status(self, *, for_operators: bool) -> generation_pb2.GetClusterStatusResponse:
        """Return the state of the cluster; addresses and causes are for operators."""
        num_waiting = self._services.admission.num_waiting
        workers = self._services.directory.status()
        if not for_operators:
            workers = without_addresses(workers)
        return generation_pb2.GetClusterStatusResponse(
            model=self._model.facts.name,
            waiting_requests=num_waiting,
            running_requests=max(0, self.num_active - num_waiting),
            workers=workers,
            waiting_tokens=round(self._services.admission.waiting_tokens),
            admitted_requests=self._services.admission.num_let_in,
            placements=[
                generation_pb2.PlacementCount(kind=kind, why=why, requests=count)
                for (kind, why), count in sorted(self._services.directory.placement.placed.items())
            ],
        )

    async def FlushCaches(
        self, request: generation_pb2.FlushCachesRequest, context: Context
    ) -> generation_pb2.FlushCachesResponse:
        if unknown := unknown_fields(request):
            raise InvalidRequestError(*unknown)
        flushed = await asyncio.gather(
            *(_flush(worker) for worker in self._services.directory.workers)
        )
        return generation_pb2.FlushCachesResponse(workers=flushed)

    def _facts(self) -> ModelLimits:
        return self._services.directory.facts

    def _register(
        self,
        checked: AdmissibleRequest,
        outputs: Sequence[Output],
        call: GenerateCall,
    ) -> RequestKey:
        """Create and register a flow for each choice; return their key.

        Raises:
            DuplicateRequestError: a request with this key is running.
        """
        engine = checked.engine
        note(request_id=engine.request_id, prompt_tokens=len(engine.prompt_token_ids))
        key = RequestKey(call.caller.identity, engine.request_id)
        if key in self._running:
            raise DuplicateRequestError(f"request_id: {engine.request_id!r} is running already")
        self._services.metrics.prompt_tokens.inc(checked.num_choices * len(engine.prompt_token_ids))
        # None without a deadline, although it is typed as a float.
        remaining_s = cast("float | None", call.context.time_remaining())
        timeout_s = self._limits.max_request_s
        timeout_s = timeout_s if remaining_s is None else min(remaining_s, timeout_s)
        self.counts.accepted += 1
        self._running[key] = tuple(
            RequestFlow(
                choice_of(checked, index),
                Answer(
                    engine.request_id,
                    index,
                    output,
                    call.responses,
                    call.timeline.sibling() if index else call.timeline,
                ),
                self._services,
                timeout_s,
            )
            for index, output in enumerate(outputs)
        )
        return key

    async def _output(self, checked: AdmissibleRequest, index: int) -> Output:
        """Return the output of choice `index`, fed with the tokens that its client has.

        Raises:
            InvalidRequestError: the client cannot have these tokens.
        """
        text_tokenizer = self._model.text_tokenizer
        detokenizer = None
        if text_tokenizer is not None and checked.wants_text:
            detokenizer = text_tokenizer.detokenizers.new(checked.engine.prompt_token_ids)
        output = Output(checked.engine, checked.stop_strings, detokenizer)
        await feed(output, checked.resumed_of(index), checked.engine, index)
        return output

    def _ended(
        self,
        key: RequestKey,
        hold: QuotaHold,
        checked: AdmissibleRequest,
        call: GenerateCall,
        task: "asyncio.Task[None]",
    ) -> None:
        error = None if task.cancelled() else task.exception()
        self.counts.failed += error is not None
        flows = self._running.pop(key)
        works = [flow.work for flow in flows]
        call.responses.close()
        if self._log is not None:
            for flow in flows:
                self._log.write(ended(checked, call.caller, flow.answer, error))
        hold.settle(
            QuotaCharge(
                prompt_tokens=sum(work.prompt_tokens for work in works),
                generated_tokens=sum(work.output_tokens for work in works),
            ),
            waited_s=call.timeline.timings.router_queue_s,
        )

    def _limits_of(self, caller: Caller) -> NamedLimits:
        clients = self._limits.clients
        return NamedLimits() if clients is None else clients.of(caller)

    def _charge(self, checked: AdmissibleRequest, limits: ClientLimits) -> QuotaCharge:
        """Return the charge of a request that arrives: its prompt, and what its client's requests
        usually generate.
        """
        expected = 0.0
        if limits.generated_tokens_per_minute:
            expected = self._services.service_model.habits.expected_tokens(
                checked.client, checked.engine.max_tokens
            )
        return QuotaCharge(
            prompt_tokens=checked.num_choices * len(checked.engine.prompt_token_ids),
            generated_tokens=checked.num_choices * expected,
        )


def client_salt(identity: str, salt: str) -> str:
    """Return a salt derived from client and given salt: equal at every router, unique to the
    client.
    """
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
