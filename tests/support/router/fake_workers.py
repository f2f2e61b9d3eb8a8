"""Prefill and decode workers that compute by hand, speaking the real protos over real gRPC.

Output token `i` of a prompt is `(sum(prompt) + i) % vocab_size`. A `Fabric` replaces the data
plane between them. A test hooks into named points of a request's life (`worker.at(Point.COMMIT,
action)`) to delay, refuse, fail or kill, and reads the shared journal to see what happened in which
order. Session, epoch and stream accounting is real, so that a test can ask whether anything is
left.
"""

import asyncio
import contextlib
import itertools
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import grpc
from prometheus_client import CollectorRegistry, Counter

from decode.event_sender import DecodeEventSender
from engine.core.request import SampledToken, TokenLogprobs
from pool.request.router_call import Opening, RequestKind, RouterCall
from pool.request.streams import Inbox
from protos import (
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    transfer_pb2,
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from runtime.errors import (
    BatonError,
    CapacityError,
    ConfigError,
    FieldViolation,
    InvalidRequestError,
)
from runtime.observe.metrics.calls import RpcMetrics
from runtime.rpc.calls import CallTracker
from runtime.rpc.server import GrpcServer, ServerOptions
from runtime.version import WIRE_VERSION

VOCAB_SIZE = 512
MAX_UNREAD_SCORES = 16  # as prefill.proto says
ENDLESS_METHODS = frozenset(
    {"/baton.v1.Worker/Watch", "/baton.v1.Prefill/Serve", "/baton.v1.Decode/Serve"}
)
Context = grpc.aio.ServicerContext[Any, Any]
Hook = Callable[[types_pb2.EngineRequest], Awaitable[object]]


def expected_tokens(prompt: list[int], count: int) -> list[int]:
    """Compute the response of the fakes by hand."""
    return [(sum(prompt) + i) % VOCAB_SIZE for i in range(count)]


class Point(StrEnum):
    """Where a request can be caught, in the order of its life."""

    QUEUED = "queued"  # prefill got it
    STARTED = "started"  # prefill said so
    RESERVE = "reserve"  # decode is about to reserve
    POSTING = "posting"  # decode has reserved and is about to say where
    RESERVED = "reserved"  # decode sent the places of its pages
    COMPUTED = "computed"  # prefill is about to say the first token
    SENDING = "sending"  # prefill got the destination terms
    SENT = "sent"  # prefill said that every byte has left
    COMMIT = "commit"  # decode is about to commit
    TOKEN = "token"  # decode is about to send a token
    FINISH = "finish"  # decode is about to finish
    RELEASED = "released"  # prefill freed its pages after a release


class Fabric:
    """The data plane: prefill delivers to (session, epoch), decode waits for it."""

    def __init__(self) -> None:
        self._delivered: defaultdict[tuple[str, int], asyncio.Event] = defaultdict(asyncio.Event)

    def deliver(self, destination: transfer_pb2.DestinationTerms) -> None:
        self._delivered[destination.session_id, destination.epoch].set()

    def delivered(self, session_id: str, epoch: int) -> asyncio.Event:
        return self._delivered[session_id, epoch]


@dataclass
class Journal:
    """(worker, what happened) in order."""

    entries: list[tuple[str, str]] = field(default_factory=list)

    def note(self, worker: str, what: str) -> None:
        self.entries.append((worker, what))

    def events(self) -> list[str]:
        return [what for _, what in self.entries]


class CachelessWorker(worker_pb2_grpc.WorkerServicer):
    """One that keeps nothing of prompts."""

    async def FlushCache(
        self, request: worker_pb2.FlushCacheRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.FlushCacheResponse:
        return worker_pb2.FlushCacheResponse()

    async def SetRoles(
        self, request: worker_pb2.SetRolesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.SetRolesResponse:
        return worker_pb2.SetRolesResponse(epoch=request.epoch, roles=request.roles)


class FakeWorker(CachelessWorker):
    """Server, watch stream, hooks and accounting of both roles."""

    role = ""
    service = ""

    def __init__(
        self,
        name: str,
        fabric: Fabric,
        journal: Journal,
        *,
        compatibility: str = "digest",
        max_running: int = 64,
        num_pages: int = 1024,
    ) -> None:
        self.name = name
        self.fabric = fabric
        self.journal = journal
        self.address = "127.0.0.1:0"
        self.incarnation = ""
        self.compatibility = compatibility
        self.max_running = max_running
        self.num_pages = num_pages
        self.max_context_tokens = 256
        self.tokenizer_digest = ""
        self.serving = True
        self.queued_tokens = 0  # what it says that waits
        self.start_s = 0.0  # how long it says that it took to start
        self.local_rest_tokens = 0  # how short a rest of a prompt it says that it computes itself
        self.kept: tuple[bytes, ...] = ()  # names of the blocks of prompts that it says it has
        self.reports = True  # whether the watch stream says anything after its facts
        self.open_requests: list[str] = []
        self.refused: dict[str, int] = defaultdict(int)
        self.wire_version = WIRE_VERSION
        self.repeats = ""  # kind of the event that the next request gets twice
        self.num_calls = 0  # that routers have open
        self._expired = Counter(
            "expired", "Waits that took too long.", registry=CollectorRegistry()
        )
        self._hooks: dict[Point, Hook] = {}
        self._server: GrpcServer | None = None

    def copies(self, event: prefill_pb2.PrefillEvent | decode_pb2.DecodeEvent) -> int:
        """Return how often to send an event: twice if it is the one to repeat, but only once."""
        if not self.repeats or event.WhichOneof("event") != self.repeats:
            return 1
        self.repeats = ""
        return 2

    def at(self, point: Point, hook: Hook) -> None:
        """Run `hook` whenever a request reaches `point`; an error of it ends that request's
        stream."""
        self._hooks[point] = hook

    def die_at(self, point: Point) -> None:
        """Die when the next request reaches `point`; after a restart the worker is healthy."""

        async def dies(_: types_pb2.EngineRequest) -> None:
            self._hooks.clear()
            self._dying = asyncio.create_task(self.die())
            await asyncio.sleep(30)

        self._hooks[point] = dies

    def fail_at(self, point: Point, error: Exception, *, times: int = 1) -> None:
        """Raise `error` for the next `times` requests that reach `point`."""
        left = itertools.count(times, -1)

        async def fails(_: types_pb2.EngineRequest) -> None:
            if next(left) > 0:
                raise error

        self._hooks[point] = fails

    async def start(self) -> None:
        """Listen under the same address as before; a new incarnation."""
        self.incarnation = uuid.uuid4().hex
        async with asyncio.timeout(60):
            while self._server is None:
                try:
                    await self._listen()
                except ConfigError:  # the kernel assigned its port to a connection meanwhile
                    await asyncio.sleep(0.1)

    async def _listen(self) -> None:
        server = GrpcServer(
            ServerOptions(listen=self.address),
            services=(self.service,),
            metrics=RpcMetrics.create(CollectorRegistry()),
            background_methods=ENDLESS_METHODS,
        )
        worker_pb2_grpc.add_WorkerServicer_to_server(self, server.grpc)
        self.register(server.grpc)
        self.address = await server.start()
        self._server = server

    async def die(self) -> None:
        """End every stream at once, without a status."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.grpc.stop(grace=None)

    def register(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError

    @property
    def calls(self) -> CallTracker:
        assert self._server is not None
        return self._server.calls

    @contextlib.contextmanager
    def called(self) -> Iterator[None]:
        """Serve a router's call for all of its requests."""
        self.num_calls += 1
        try:
            yield
        finally:
            self.num_calls -= 1

    def check_length(self, request: types_pb2.EngineRequest) -> None:
        """Check the length like pool.request.conversion."""
        num_tokens = len(request.prompt_token_ids) + request.max_tokens
        if num_tokens > self.max_context_tokens:
            raise InvalidRequestError(
                FieldViolation(
                    "prompt_token_ids",
                    f"{num_tokens} tokens are over the context limit of {self.max_context_tokens}",
                )
            )

    async def reached(self, point: Point, request: types_pb2.EngineRequest) -> None:
        if point in self._hooks:
            await self._hooks[point](request)
        self.journal.note(self.name, point)

    @contextlib.contextmanager
    def holding(self, request_id: str) -> Any:  # noqa: ANN401 (an iterator, as contextmanager wants it)
        self.open_requests.append(request_id)
        try:
            yield
        finally:
            self.open_requests.remove(request_id)

    async def Watch(
        self, request: worker_pb2.WatchRequest, context: Context
    ) -> AsyncIterator[worker_pb2.WatchResponse]:
        yield worker_pb2.WatchResponse(
            info=worker_pb2.WorkerInfo(
                role=self.role,
                incarnation=self.incarnation,
                model="tiny",
                architecture="Tiny",
                revision="r1",
                compatibility=self.compatibility,
                compatibility_text=f"text of {self.compatibility}",
                vocab_size=VOCAB_SIZE,
                max_context_tokens=self.max_context_tokens,
                num_layers=4,
                tokenizer_digest=self.tokenizer_digest,
                wire_version=self.wire_version,
                page_size=16,
                pages_total=self.num_pages,
                max_running_requests=self.max_running,
                max_queued_requests=1000,
                stages=["0-2", "2-4"],
            )
        )
        said: list[tuple[bytes, ...]] = []
        while True:
            if self.kept and self.kept not in said:
                yield worker_pb2.WatchResponse(
                    cache=worker_pb2.CacheReport(
                        number=len(said), whole=True, stored=b"".join(self.kept)
                    )
                )
                said.append(self.kept)
            if self.reports:
                yield worker_pb2.WatchResponse(
                    load=worker_pb2.WorkerLoad(
                        cache_reports=len(said),
                        serving=self.serving,
                        reason="" if self.serving else "draining",
                        queued_tokens=self.queued_tokens,
                        running_requests=len(self.open_requests),
                        pages_free=self.num_pages,
                        start_s=self.start_s,
                        local_rest_tokens=self.local_rest_tokens,
                    )
                )
            await asyncio.sleep(request.interval_s)


class FakePrefill(FakeWorker, prefill_pb2_grpc.PrefillServicer):
    """Computes the first token, 'sends' to the destination terms it is given, waits for the
    half-close."""

    role = "prefill"
    service = "baton.v1.Prefill"
    first_token_offset = 0  # a wrong one, if not 0
    says_first_token = True
    prefill_s = 0.125  # what it says that a prompt took
    scored_chunks: tuple[int, ...] = (1000,)  # tokens scored per message; position p scores -p

    def __init__(self, name: str, fabric: Fabric, journal: Journal, **options: Any) -> None:  # noqa: ANN401
        super().__init__(name, fabric, journal, **options)
        self.num_scored: defaultdict[str, int] = defaultdict(
            int
        )  # messages of scores that were sent, by request

    def register(self, server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServicer_to_server(self, server)

    async def Serve(
        self, request_iterator: AsyncIterator[prefill_pb2.PrefillInputs], context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillEvents]:
        kind: RequestKind[prefill_pb2.PrefillInput, prefill_pb2.PrefillEvent] = RequestKind(
            "/baton.v1.Prefill/Run",
            self._run,
            lambda item: item.open.context,
            lambda key, ended: prefill_pb2.PrefillEvent(key=key, ended=ended),
        )
        call = RouterCall(kind, self.calls, self._expired)
        with self.called():
            async with contextlib.aclosing(
                call.events(item.inputs async for item in request_iterator)
            ) as batches:
                async for events in batches:
                    yield prefill_pb2.PrefillEvents(
                        events=[event for event in events for _ in range(self.copies(event))]
                    )

    async def _run(
        self, opening: Opening[prefill_pb2.PrefillInput, prefill_pb2.PrefillEvent]
    ) -> None:
        request = opening.input.open.request

        def says(**event: Any) -> None:  # noqa: ANN401 - fields of a message
            opening.event_sender.send(
                prefill_pb2.PrefillEvent(key=opening.event_sender.key, **event)
            )

        with self.holding(request.request_id), _reading(opening.inbox) as inputs:
            await self.reached(Point.QUEUED, request)
            if inputs.destination.done():
                raise InvalidRequestError(
                    FieldViolation("input", "expected one destination, after started")
                )
            says(started=prefill_pb2.PrefillStarted(queue_s=0.25, terms=self._terms(request)))
            await self.reached(Point.STARTED, request)
            for scored in self._scores(request):
                await inputs.may_score.acquire()
                self.num_scored[request.request_id] += 1
                says(scored=scored)
            await self.reached(Point.COMPUTED, request)
            token = (
                expected_tokens(list(request.prompt_token_ids), 1)[0] + self.first_token_offset
            ) % VOCAB_SIZE
            if self.says_first_token:
                says(
                    first_token=prefill_pb2.PrefillFirstToken(
                        token=types_pb2.TokenChunk(token_ids=[token]), prefill_s=self.prefill_s
                    )
                )
            terms = await inputs.destination
            await self.reached(Point.SENDING, request)
            self.fabric.deliver(terms)
            says(sent=prefill_pb2.PrefillSent(num_bytes=1))
            await self.reached(Point.SENT, request)
            await inputs.released.wait()
            await self.reached(Point.RELEASED, request)

    def _scores(self, request: types_pb2.EngineRequest) -> Iterator[types_pb2.PromptLogprobs]:
        prompt, start = request.prompt_token_ids, 1
        for count in self.scored_chunks if request.HasField("num_prompt_logprobs") else ():
            token_ids = prompt[start : start + count]
            yield types_pb2.PromptLogprobs(
                first_position=start,
                token_ids=token_ids,
                logprobs=[
                    types_pb2.TokenLogprobs(logprob=-float(start + i))
                    for i in range(len(token_ids))
                ],
            )
            start += count

    def _terms(self, request: types_pb2.EngineRequest) -> transfer_pb2.SourceTerms:
        return transfer_pb2.SourceTerms(
            compatibility=self.compatibility,
            page_size=16,
            num_tokens=len(request.prompt_token_ids),
            chunk_tokens=64,
        )


class FakeDecode(FakeWorker, decode_pb2_grpc.DecodeServicer):
    """Reserves, waits for the delivery and the first token, counts on. Without a source it draws
    the first one, too."""

    role = "decode"
    service = "baton.v1.Decode"
    token_pause_s = 0.0
    tokens_per_chunk = 1
    sources_lost = 0  # how often a router said so

    def __init__(self, name: str, fabric: Fabric, journal: Journal, **options: Any) -> None:  # noqa: ANN401
        super().__init__(name, fabric, journal, **options)
        self.call_errors: list[
            BatonError
        ] = []  # what the next message with tokens is lost by, and the call with it
        self.times_sent: Callable[[int], int] = lambda position: (
            1
        )  # the tokens at a position; 0: they are lost

    def register(self, server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServicer_to_server(self, server)

    async def Serve(
        self, request_iterator: AsyncIterator[decode_pb2.DecodeInputs], context: Context
    ) -> AsyncIterator[decode_pb2.DecodeEvents]:
        kind: RequestKind[decode_pb2.DecodeInput, decode_pb2.DecodeEvent] = RequestKind(
            "/baton.v1.Decode/Generate",
            self._generate,
            lambda item: item.open.context,
            lambda key, ended: decode_pb2.DecodeEvent(key=key, ended=ended),
        )
        call = RouterCall(kind, self.calls, self._expired)
        with self.called():
            async with contextlib.aclosing(
                call.events(item.inputs async for item in request_iterator)
            ) as batches:
                async for events in batches:
                    if self.call_errors and any(event.HasField("tokens") for event in events):
                        raise self.call_errors.pop()
                    yield decode_pb2.DecodeEvents(
                        events=[
                            event
                            for event in events
                            for _ in range(
                                self.times_sent(event.position)
                                if event.HasField("tokens")
                                else self.copies(event)
                            )
                        ]
                    )

    async def _generate(
        self, opening: Opening[decode_pb2.DecodeInput, decode_pb2.DecodeEvent]
    ) -> None:
        pending = opening.input.open
        request, known = pending.request, list[int]()
        self.check_length(request)
        await self.reached(Point.RESERVE, request)
        if len(self.open_requests) >= self.max_running:
            self.refused[request.request_id] += 1
            raise CapacityError(f"{self.name} is full", resource="slots")
        with self.holding(request.request_id):
            inputs: asyncio.Queue[decode_pb2.DecodeInput] = asyncio.Queue()
            reader = asyncio.create_task(self._read_into(opening.inbox, inputs))
            try:
                position = 1 + len(pending.replayed_token_ids) if pending.HasField("source") else 0
                event_sender = DecodeEventSender(opening.event_sender, position)
                if pending.HasField("source"):
                    await self._receive(pending, inputs, known, event_sender)
                await self._decode(
                    pending, event_sender, known, lambda: opening.event_sender.unsent is None
                )
            finally:
                reader.cancel()

    async def _read_into(
        self,
        inbox: Inbox[decode_pb2.DecodeInput, Any],
        inputs: "asyncio.Queue[decode_pb2.DecodeInput]",
    ) -> None:
        while True:
            message = await inbox.get(None, "")
            assert isinstance(message, decode_pb2.DecodeInput)
            if message.HasField("source_lost"):
                self.sources_lost += 1
            else:
                await inputs.put(message)

    async def _receive(
        self,
        pending: decode_pb2.DecodeOpen,
        inputs: "asyncio.Queue[decode_pb2.DecodeInput]",
        known: list[int],
        event_sender: DecodeEventSender,
    ) -> None:
        """Add received tokens to `known`."""
        session_id, first_token, request = uuid.uuid4().hex, None, pending.request
        for epoch in itertools.count():
            await self.reached(Point.POSTING, request)
            if not inputs.empty():
                message = inputs.get_nowait()
                if message.HasField("new_source"):
                    continue  # overtaken: only the newer source's handoff completes
                first_token = message.first_token.token_ids[0]
            event_sender.destination(
                transfer_pb2.DestinationTerms(session_id=session_id, epoch=epoch)
            )
            await self.reached(Point.RESERVED, request)
            delivered = self.fabric.delivered(session_id, epoch)
            first_token = await _first_token_and_delivery(inputs, delivered, first_token)
            if delivered.is_set() and first_token is not None:
                break
        assert first_token is not None
        known += [first_token, *pending.replayed_token_ids]

    async def _decode(
        self,
        pending: decode_pb2.DecodeOpen,
        event_sender: DecodeEventSender,
        tokens: list[int],
        is_sent: Callable[[], bool],
    ) -> None:
        request = pending.request
        if pending.HasField("source"):
            await self.reached(Point.COMMIT, request)
            event_sender.committed(
                decode_pb2.DecodeCommitted(transfer_exposed_s=0.0625, num_bytes=1)
            )
        else:
            event_sender.local(decode_pb2.DecodeLocal(cached_tokens=16 * len(self.kept)))
            await self.reached(Point.COMPUTED, request)
            tokens += expected_tokens(list(request.prompt_token_ids), 1)
            event_sender.generated([SampledToken(token_id) for token_id in tokens])
        assert tokens == expected_tokens(list(request.prompt_token_ids), len(tokens)), (
            "what it gets is what was drawn"
        )
        while (reason := _finish_reason(request, tokens)) is None:
            if self.token_pause_s:
                await asyncio.sleep(self.token_pause_s)
            await self.reached(Point.TOKEN, request)
            chunk: list[int] = []
            while len(chunk) < self.tokens_per_chunk and _finish_reason(request, tokens) is None:
                chunk.append((tokens[-1] + 1) % VOCAB_SIZE)
                tokens.append(chunk[-1])
            shows = request.HasField("num_top_logprobs")
            event_sender.generated(
                [SampledToken(t, TokenLogprobs(-float(t)) if shows else None) for t in chunk]
            )
            while not is_sent():  # noqa: ASYNC110 - none joins another: routers read in time, or end the call
                await asyncio.sleep(0)
        await self.reached(Point.FINISH, request)
        stopped = tokens[-1] if reason == types_pb2.FINISH_REASON_STOP else None
        event_sender.finished(
            decode_pb2.DecodeFinished(
                reason=reason, stop_token_id=stopped, queue_s=0.03125, decode_s=0.5
            )
        )


class _PrefillInputs:
    """What a router has sent for one prompt."""

    def __init__(self) -> None:
        self.destination: asyncio.Future[transfer_pb2.DestinationTerms] = (
            asyncio.get_running_loop().create_future()
        )
        self.may_score = asyncio.Semaphore(MAX_UNREAD_SCORES)
        self.released = asyncio.Event()

    async def read(self, inbox: Inbox[prefill_pb2.PrefillInput, Any]) -> None:
        while True:
            message = await inbox.get(None, "")
            assert isinstance(message, prefill_pb2.PrefillInput)
            match message.WhichOneof("input"):
                case "destination":
                    self.destination.set_result(message.destination)  # a prompt gets them once
                case "scores_read":
                    for _ in range(message.scores_read.count):
                        self.may_score.release()
                case other:
                    assert other == "release", f"a prompt got {other}"
                    self.released.set()


@contextlib.contextmanager
def _reading(inbox: Inbox[prefill_pb2.PrefillInput, Any]) -> Iterator[_PrefillInputs]:
    """Read inputs while other work runs."""
    inputs = _PrefillInputs()
    task = asyncio.create_task(inputs.read(inbox))
    try:
        yield inputs
    finally:
        task.cancel()


def _finish_reason(
    request: types_pb2.EngineRequest, tokens: list[int]
) -> types_pb2.FinishReason | None:
    if tokens[-1] in request.stop_token_ids and len(tokens) >= request.min_tokens:
        return types_pb2.FINISH_REASON_STOP
    return types_pb2.FINISH_REASON_LENGTH if len(tokens) >= request.max_tokens else None


async def _first_token_and_delivery(
    inputs: "asyncio.Queue[decode_pb2.DecodeInput]",
    delivered: asyncio.Event,
    first_token: int | None,
) -> int | None:
    """Wait until both are there; the token alone if another source takes over first."""
    destination, message = asyncio.create_task(delivered.wait()), asyncio.create_task(inputs.get())
    try:
        while first_token is None or not delivered.is_set():
            await asyncio.wait(
                {message} if delivered.is_set() else {message, destination},
                return_when=asyncio.FIRST_COMPLETED,
            )
            if message.done():
                if message.result().HasField("new_source"):
                    return first_token
                first_token = message.result().first_token.token_ids[0]
                message = asyncio.create_task(inputs.get())
        return first_token
    finally:
        destination.cancel()
        message.cancel()
