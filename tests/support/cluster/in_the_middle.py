"""A worker in the middle: between a router and a true worker, it changes what they tell each other."""

import random
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import torch

from baton.client import AsyncBatonClient
from baton.retry import NO_RETRY
from baton.values import Chunk
from engine.core.request import Request, SamplingParams
from protos import decode_pb2, prefill_pb2
from runtime.errors import BatonError
from tests.support.cluster.leaders import flush, leader_address
from tests.support.cluster.one_process import cluster_in_process
from tests.support.cluster.questions import as_query
from tests.support.cluster.reference import Reference
from tests.support.models.checkpoints import make_checkpoint

RouterInput = prefill_pb2.PrefillInput | decode_pb2.DecodeInput
WorkerEvent = prefill_pb2.PrefillEvent | decode_pb2.DecodeEvent
Lie = Callable[[Any], Iterable[WorkerEvent]]
"""What the router gets for an event of a worker, which is of one of the two types."""
AnyContext = grpc.aio.ServicerContext[bytes, bytes]
_SERVE = {
    "/baton.v1.Prefill/Serve": (prefill_pb2.PrefillInputs, prefill_pb2.PrefillEvents),
    "/baton.v1.Decode/Serve": (decode_pb2.DecodeInputs, decode_pb2.DecodeEvents),
}


class Attack:
    """What happens to messages in the middle; as it is, nothing."""

    def input(self, message: RouterInput) -> Iterable[RouterInput]:
        """Return what the worker gets for an input of the router."""
        return (message,)

    def event(self, message: WorkerEvent) -> Iterable[WorkerEvent]:
        """Return what the router gets for an event of the worker."""
        return (message,)


class WorkerInTheMiddle(grpc.GenericRpcHandler):
    """A proxy of one worker. It passes all methods on, and the messages of requests to `attack`."""

    def __init__(self, announced: Path) -> None:
        self._announced = announced
        self.attack = Attack()

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[bytes, bytes]":
        method = handler_call_details.method

        async def forward(
            requests: AsyncIterator[bytes], context: AnyContext
        ) -> AsyncIterator[bytes]:
            timeout = context.time_remaining()
            async with grpc.aio.insecure_channel(leader_address(self._announced)) as channel:
                true: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
                    method
                )
                call = true(
                    self._inputs(method, requests),
                    timeout=timeout,
                    metadata=[
                        (key, value)
                        for key, value in context.invocation_metadata() or ()
                        if not key.startswith("grpc-") and key != "user-agent"
                    ],
                )
                try:
                    async for event in self._events(method, aiter(call)):
                        yield event
                except grpc.aio.AioRpcError as error:
                    await context.abort(error.code(), error.details() or "")

        return grpc.stream_stream_rpc_method_handler(forward)

    async def _inputs(self, method: str, messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for raw in messages:
            if method not in _SERVE:
                yield raw
                continue
            kind: Any = _SERVE[method][0]
            inputs = [to for each in kind.FromString(raw).inputs for to in self.attack.input(each)]
            if inputs:
                yield kind(inputs=inputs).SerializeToString()

    async def _events(self, method: str, messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for raw in messages:
            if method not in _SERVE:
                yield raw
                continue
            kind: Any = _SERVE[method][1]
            events = [to for each in kind.FromString(raw).events for to in self.attack.event(each)]
            if events:
                yield kind(events=events).SerializeToString()


@asynccontextmanager
async def in_the_middle(announced: Path) -> AsyncIterator[tuple[WorkerInTheMiddle, str]]:
    """Yield a proxy, and its address, of the worker that announces itself in this file."""
    server = grpc.aio.server(options=[("grpc.http2.max_ping_strikes", 0)])  # as Baton's own
    worker = WorkerInTheMiddle(announced)
    server.add_generic_rpc_handlers((worker,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield worker, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


class Liar(Attack):
    """Changes events of the first request that it sees: all, or only the first that it can."""

    def __init__(self, lie: Lie, *, always: bool = False) -> None:
        self._lie = lie
        self._always = always
        self._key: int | None = None
        self.num_lies = 0

    def input(self, message: RouterInput) -> Iterable[RouterInput]:
        if self._key is None and message.HasField("open"):
            self._key = message.key
        return (message,)

    def event(self, message: WorkerEvent) -> Iterable[WorkerEvent]:
        if message.key != self._key or (self.num_lies and not self._always):
            return (message,)
        given = type(message).FromString(message.SerializeToString())
        told = list(self._lie(given))
        self.num_lies += told != [message]
        return told


def instead_of(kind: str, *sent: str, then: Callable[[Any], object] = lambda _: None) -> Lie:
    """Return a lie that sends events of these kinds instead of one of a kind.

    "same" stands for that event itself, which `then` changes, and "none" for one of no kind.
    """

    def lie(event: WorkerEvent) -> Sequence[WorkerEvent]:
        if event.WhichOneof("event") != kind:
            return (event,)
        then(event)
        return [event if other == "same" else _empty(event, other) for other in sent]

    return lie


def _empty(event: WorkerEvent, kind: str) -> WorkerEvent:
    """Return an event of this kind in the place of another."""
    empty = type(event)(key=event.key)
    if isinstance(empty, decode_pb2.DecodeEvent) and isinstance(event, decode_pb2.DecodeEvent):
        empty.position = event.position
    if kind != "none":
        getattr(empty, kind).SetInParent()
    return empty


def with_terms(change: Callable[[Any], object]) -> Lie:
    """Return a lie about the terms of a worker's side of a handoff."""

    def lie(event: WorkerEvent) -> Sequence[WorkerEvent]:
        if isinstance(event, decode_pb2.DecodeEvent):
            if event.HasField("destination"):
                change(event.destination)
        elif event.HasField("started"):
            change(event.started.terms)
        return (event,)

    return lie


def setting(name: str, value: object) -> Callable[[Any], object]:
    """Return a function that sets a field of a message."""
    return lambda message: setattr(message, name, value)


def setting_stage(name: str, value: object) -> Callable[[Any], object]:
    """Return a function that sets a field of the first stage in terms."""
    return lambda terms: setattr(terms.stages[0], name, value)


@dataclass
class AttackedCluster:
    """A cluster with a worker in the middle, and one question with its answer."""

    client: AsyncBatonClient
    worker: WorkerInTheMiddle
    folder: Path
    question: Request
    right: list[int]
    number: int = 0

    async def forget(self) -> None:
        """Empty the caches of both pools."""
        for role in ("prefill", "decode"):
            await flush(self.folder / f"{role}-0.json")

    async def ask(self, attack: Attack, *, timeout_s: float) -> tuple[list[int], BatonError | None]:
        """Ask during an attack, with empty caches. Return the tokens sent, and the error."""
        await self.forget()
        self.number += 1
        self.worker.attack = attack
        return await outcome(
            self.client, replace(self.question, request_id=f"q{self.number}"), timeout_s
        )

    async def check_harmless(self, lies: Mapping[str, Lie]) -> None:
        """Check that no lie changes its request's response or that of the next request."""
        for name, lie in lies.items():
            liar = Liar(lie)
            assert await self.ask(liar, timeout_s=8) == (self.right, None), name
            assert liar.num_lies, name
            assert await self.ask(Attack(), timeout_s=8) == (self.right, None), name


async def outcome(
    client: AsyncBatonClient, question: Request, timeout_s: float
) -> tuple[list[int], BatonError | None]:
    """Return the tokens of a response, and the error that ended it; None if it finished."""
    tokens: list[int] = []
    try:
        async for event in client.generate(as_query(question), timeout_s=timeout_s):
            tokens += event.token_ids if isinstance(event, Chunk) else ()
    except BatonError as error:
        return tokens, error
    return tokens, None


@asynccontextmanager
async def attacked_cluster(
    folder: Path, role: str, **settings: object
) -> AsyncIterator[AttackedCluster]:
    """Yield a cluster in which a worker of `role` is reached through one in the middle."""
    model = make_checkpoint(folder, "llama", dtype=torch.bfloat16)
    prompt = tuple(random.Random(6).choices(range(3, 256), k=200))
    question = Request("q0", prompt, 8, SamplingParams(temperature=0.0), num_top_logprobs=0)
    (answer,) = Reference(model).answers([question])
    async with (
        in_the_middle(folder / f"{role}-0.json") as (worker, address),
        cluster_in_process(
            model,
            announced=folder,
            page_size=16,
            chunk_tokens=64,
            retry=NO_RETRY,  # what is right is so without the client's help
            router={role: (address,), **settings},
        ) as client,
    ):
        yield AttackedCluster(client, worker, folder, question, [token for token, _ in answer])
