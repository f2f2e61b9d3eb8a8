"""A router in this process, in front of fake workers, reached by a real client."""

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import grpc
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from protos import generation_pb2, generation_pb2_grpc, worker_pb2
from router.api.generation import GenerationService, RequestLimits
from router.api.readiness import SERVICE, Readiness
from router.request.admission import Admission
from router.request.flow import Services
from router.request.priorities import PriorityLimits
from router.request.rejections import AdmissionLimits
from router.request.request_log import RequestLog
from router.request.retries import FlowLimits
from router.request.service_times import ServiceTimeModel
from router.text.chat_template import ChatTemplate
from router.text.model_facts import ModelLimits, ServedModel
from router.text.tokenizer import TextTokenizer
from router.workers.directory import Directory, DirectoryOptions
from router.workers.discovery import DiscoveryOptions
from router.workers.policy import Policy
from router.workers.worker import WorkerRole
from runtime.clock import SystemClock
from runtime.errors import BatonError
from runtime.observe.metrics.calls import RpcMetrics
from runtime.observe.metrics.router import ClientMetrics, RouterMetrics
from runtime.rpc.server import GrpcServer, ServerOptions
from runtime.rpc.status import error_from_rpc
from runtime.security.access import OPEN_SERVER, ServerSecurity
from runtime.version import WIRE_VERSION
from tests.support.router.fake_workers import VOCAB_SIZE, FakeDecode, FakePrefill, FakeWorker

EOS = VOCAB_SIZE - 1
FACTS = ModelLimits(
    name="tiny",
    architecture="Tiny",
    vocab_size=VOCAB_SIZE,
    max_context_tokens=256,
    num_layers=4,
    eos_token_ids=(EOS,),
)
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)
# Patience that a busy machine does not exhaust. Tests of what happens when patience ends bring
# their own.
FLOW_LIMITS = FlowLimits(peer_wait_s=30.0, capacity_wait_s=30.0, reserve_s=30.0, commit_s=30.0)
ADMISSION_LIMITS = AdmissionLimits(max_waiting=1000, max_wait_s=60.0, pairless_grace_s=30.0)
ADDRESS = re.compile(r"\d+\.\d+\.\d+\.\d+|localhost|ipv[46]:|unix:")
NO_GRACE = AdmissionLimits(pairless_grace_s=0.2)


@cache
def byte_level_tokenizer() -> Tokenizer:
    """Build a byte-level BPE with some merges, a special token and no normalizer, so that any text
    round trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    words = [
        "the red lantern near the old mill",
        "größe naïve 東京 привет 👋🏽 مرحبا",
        "stop stopping stopped",
    ] * 20
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 2,
        special_tokens=["<bot>", "<user>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(words, trainer)
    return tokenizer


@cache
def served_model() -> ServedModel:
    return ServedModel(FACTS, TextTokenizer(byte_level_tokenizer(), ChatTemplate(TEMPLATE, {})))


def write_model_dir(folder: Path) -> Path:
    """Write the files of a checkpoint that a router reads."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Tiny"],
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 256,
        "num_hidden_layers": 4,
        "eos_token_id": EOS,
    }
    (folder / "config.json").write_text(json.dumps(config))
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "bos_token": "<bot>"})
    )
    return folder


@dataclass
class Answer:
    """A stream, read to its end."""

    chunks: list[generation_pb2.GenerateChunk] = field(default_factory=list)
    finish: generation_pb2.GenerateFinish | None = None

    @property
    def token_ids(self) -> list[int]:
        return [token_id for chunk in self.chunks for token_id in chunk.token_ids]

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)


def token_request(
    prompt: list[int],
    max_tokens: int = 4,
    **fields: Any,  # noqa: ANN401
) -> generation_pb2.GenerateRequest:
    request = generation_pb2.GenerateRequest(**fields)
    request.token_ids.ids.extend(prompt)
    request.stop.max_tokens = max_tokens
    return request


def worker_info(role: WorkerRole, **changes: object) -> worker_pb2.WorkerInfo:
    """Return the info of a small worker of the tests' model."""
    facts: dict[str, object] = {
        "role": role.value,
        "incarnation": "a",
        "architecture": "Tiny",
        "vocab_size": VOCAB_SIZE,
        "num_layers": 4,
        "max_context_tokens": 256,
        "page_size": 16,
        "pages_total": 10,
        "slots_total": 4,
        "max_running_requests": 4,
        "max_queued_requests": 3,
        "wire_version": WIRE_VERSION,
    }
    return worker_pb2.WorkerInfo(**(facts | changes))  # type: ignore[arg-type]


class RouterHarness:
    """A running router with its workers."""

    def __init__(
        self,
        directory: Directory,
        services: Services,
        service: GenerationService,
        server: GrpcServer,
        stub: "generation_pb2_grpc.GenerationAsyncStub",
        channel: grpc.aio.Channel,
        workers: tuple[FakeWorker, ...],
        registry: CollectorRegistry,
        address: str,
    ) -> None:
        self.address = address
        self.directory = directory
        self.services = services
        self.service = service
        self.server = server
        self.stub = stub
        self.channel = channel
        self.workers = workers
        self.registry = registry

    async def ask(self, request: generation_pb2.GenerateRequest, timeout_s: float = 60.0) -> Answer:
        """Read the whole stream. Raises the BatonError of the status."""
        answer = Answer()
        try:
            async for response in self.stub.Generate(request, timeout=timeout_s):
                assert answer.finish is None, "something came after the finish"
                if response.HasField("chunk"):
                    answer.chunks.append(response.chunk)
                else:
                    answer.finish = response.finish
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        assert answer.finish is not None, "the stream ended without a finish"
        return answer

    async def failure(
        self, request: generation_pb2.GenerateRequest, timeout_s: float = 60.0
    ) -> BatonError:
        """Return the error of a failed request; check that it contains no address of the
        cluster."""
        try:
            await self.ask(request, timeout_s)
        except BatonError as error:
            failure = error
        else:
            raise AssertionError("the request succeeded")
        assert not ADDRESS.search(str(failure)), f"for operators only: {failure}"
        return failure

    async def assert_nothing_left(self) -> None:
        """Check that both worker streams of every request have ended and the router has forgotten
        them."""
        await eventually(
            lambda: not any(worker.open_requests for worker in self.workers),
            "streams at the workers",
        )
        await eventually(lambda: not self.service._running, "requests in the router")
        assert self.services.admission.num_waiting == 0
        assert not any(worker.is_in_use for worker in self.directory.workers)
        await eventually(lambda: not request_tasks(), "tasks of ended requests")

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


def request_tasks() -> list[str]:
    """Return tasks that exist only during a request: flows, searches, and gRPC's request
    senders."""
    names = [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]
    kinds = (
        "RequestFlow.",
        "RouterCall._serve",
        "_StreamRequestMixin.",
    )
    return [name for name in names if name.startswith(kinds)]


async def eventually(condition: Callable[[], object], what: str, within_s: float = 30.0) -> None:
    """Wait until the condition holds."""
    deadline = asyncio.get_running_loop().time() + within_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, (
            f"still there after {within_s} s: {what}"
        )
        await asyncio.sleep(0.01)


@dataclass(frozen=True)
class Discovered:
    """Targets instead of the workers' addresses."""

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    options: DiscoveryOptions


class LowestOfEquals(random.Random):
    """A policy that picks the lowest address of equally good workers, so that tests know the
    choice."""

    def choice(self, seq: Any) -> Any:  # noqa: ANN401 (as its parent's)
        return seq[0]


REQUEST_LIMITS = RequestLimits(60.0, 30.0, PriorityLimits.parse(["*=-100"]))


@asynccontextmanager
async def running_router(
    *workers: FakeWorker,
    flow: FlowLimits = FLOW_LIMITS,
    admission: AdmissionLimits = ADMISSION_LIMITS,
    policy: Policy = Policy.LEAST_LOAD,
    model: ServedModel | None = None,
    start_workers: bool = True,
    warms_up: bool = False,
    discovered: Discovered | None = None,
    security: ServerSecurity = OPEN_SERVER,
    limits: RequestLimits = REQUEST_LIMITS,
    longest_restart_s: float = 0.0,
    request_log: RequestLog | None = None,
) -> AsyncIterator[RouterHarness]:
    """Start the fakes and a router in front of them; it is paired when the block begins, if the
    workers fit."""
    async with AsyncExitStack() as stack:
        for worker in workers:
            if start_workers:  # else another caller owns them
                await worker.start()
                stack.push_async_callback(worker.die)
        registry = CollectorRegistry()
        metrics, clock, model = (
            RouterMetrics.create(registry),
            SystemClock(),
            model or served_model(),
        )
        options = DirectoryOptions(
            _addresses(workers, FakePrefill),
            _addresses(workers, FakeDecode),
            policy,
            watch_interval_s=0.05,
            longest_restart_s=longest_restart_s,
        )
        if discovered is not None:
            options = replace(
                options,
                prefill=discovered.prefill,
                decode=discovered.decode,
                discovery=discovered.options,
            )
        directory = Directory(options, model.facts, metrics, LowestOfEquals(0))
        service_model = ServiceTimeModel(clock)
        services = Services(
            Admission(directory, admission, metrics, service_model),
            directory,
            flow,
            metrics,
            service_model,
            ClientMetrics.create(registry),
        )
        server = GrpcServer(
            ServerOptions(listen="127.0.0.1:0"),
            services=(SERVICE,),
            metrics=RpcMetrics.create(registry),
            security=security,
        )
        service = GenerationService(model, services, limits, clock, security.caller, request_log)
        generation_pb2_grpc.add_GenerationServicer_to_server(service, server.grpc)
        address = await server.start()
        stack.push_async_callback(server.grpc.stop, grace=0)
        work = [directory.run(), services.admission.run()]
        if warms_up:
            work.append(Readiness(services, server.health, 30.0).run())
        for background in work:
            task = asyncio.create_task(background)
            stack.push_async_callback(_stopped, task)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        stub = generation_pb2_grpc.GenerationStub(channel)
        harness = RouterHarness(
            directory, services, service, server, stub, channel, workers, registry, address
        )
        if start_workers:
            await eventually(
                lambda: all(
                    w.info is not None and "report" not in w.problem for w in directory.workers
                ),
                "workers that have not reported",
            )
        yield harness


async def _stopped(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _addresses(workers: tuple[FakeWorker, ...], kind: type[FakeWorker]) -> tuple[str, ...]:
    return tuple(worker.address for worker in workers if isinstance(worker, kind))


def without_tokenizer() -> ServedModel:
    return replace(served_model(), text_tokenizer=None)
