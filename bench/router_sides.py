"""Processes around the router in `bench.router`: `python -m bench.router_sides source|relay`.

`source` plays the workers of a router and, on a separate port, the service of a plain relay. It
computes nothing: every stream gets one token at the same moments, as from a pool's steps. `relay`
forwards everything from the source to the client.
"""

import argparse
import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
from prometheus_client import CollectorRegistry, Counter

from decode.event_sender import DecodeEventSender
from engine.core.request import SampledToken
from pool.request.router_call import Opening, RequestKind, RouterCall
from protos import (
    decode_pb2,
    decode_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    transfer_pb2,
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from runtime.observe.metrics.calls import RpcMetrics
from runtime.rpc.calls import CallTracker
from runtime.rpc.server import GrpcServer, ServerOptions
from runtime.version import WIRE_VERSION
from testing.past_proxies import PAST_PROXIES

TOKENS = range(300, 500)  # ids of plain words
ROOM = 1 << 20  # capacity for everything that a worker counts
ENDLESS_METHODS = frozenset(
    {"/baton.v1.Worker/Watch", "/baton.v1.Prefill/Serve", "/baton.v1.Decode/Serve"}
)

Context = grpc.aio.ServicerContext[Any, Any]


class Steps:
    """Moments at which every stream gets a token."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._next = asyncio.Event()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._step_s)
            self._next.set()
            self._next = asyncio.Event()

    async def tokens(self, count: int) -> AsyncIterator[int]:
        for token_id in itertools.islice(itertools.cycle(TOKENS), count):
            await self._next.wait()
            yield token_id


Generate = Callable[
    [generation_pb2.GenerateRequest, Context], AsyncIterator[generation_pb2.GenerateResponse]
]


def plain_source(steps: Steps) -> Generate:
    """Return the service that the relay calls."""

    async def generate(
        request: generation_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        async for token_id in steps.tokens(request.stop.max_tokens):
            yield generation_pb2.GenerateResponse(
                request_id=request.request_id,
                chunk=generation_pb2.GenerateChunk(token_ids=[token_id], text=" word"),
            )

    return generate


def relay(source: grpc.aio.Channel) -> Generate:
    """Return the service of the relay, which forwards what the source sends."""
    stub = generation_pb2_grpc.GenerationStub(source)

    async def generate(
        request: generation_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        async for response in stub.Generate(request):
            yield response

    return generate


async def serve_plainly(generate: Generate) -> tuple[grpc.aio.Server, str]:
    """Return the server, which lives while it is referenced, and its address."""
    method = grpc.unary_stream_rpc_method_handler(
        generate,
        request_deserializer=generation_pb2.GenerateRequest.FromString,
        response_serializer=generation_pb2.GenerateResponse.SerializeToString,
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("baton.v1.Generation", {"Generate": method}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


class SourceWorker(worker_pb2_grpc.WorkerServicer):
    """Worker with capacity for everything."""

    def __init__(self, role: str, model: Mapping[str, Any]) -> None:
        """Start without requests. `model` is its config.json."""
        self._info = worker_pb2.WorkerInfo(
            role=role,
            incarnation=role,
            architecture=model["architectures"][0],
            vocab_size=model["vocab_size"],
            num_layers=model["num_hidden_layers"],
            max_context_tokens=model["max_position_embeddings"],
            compatibility="source",
            page_size=64,
            pages_total=ROOM,
            wire_version=WIRE_VERSION,
            max_running_requests=ROOM,
            max_queued_requests=ROOM,
            stages=["0-1"],
        )

    async def Watch(
        self, request: worker_pb2.WatchRequest, context: Context
    ) -> AsyncIterator[worker_pb2.WatchResponse]:
        yield worker_pb2.WatchResponse(info=self._info)
        while True:
            yield worker_pb2.WatchResponse(
                load=worker_pb2.WorkerLoad(serving=True, pages_free=ROOM)
            )
            await asyncio.sleep(request.interval_s)

    async def FlushCache(
        self, request: worker_pb2.FlushCacheRequest, context: Context
    ) -> worker_pb2.FlushCacheResponse:
        return worker_pb2.FlushCacheResponse()

    async def SetRoles(
        self, request: worker_pb2.SetRolesRequest, context: Context
    ) -> worker_pb2.SetRolesResponse:
        return worker_pb2.SetRolesResponse(epoch=request.epoch, roles=request.roles)


class SourcePrefill(prefill_pb2_grpc.PrefillServicer):
    """Prefill service that generates the first token at the next step."""

    def __init__(self, steps: Steps, calls: CallTracker) -> None:
        self._steps = steps
        self._calls = calls
        self._kind: RequestKind[prefill_pb2.PrefillInput, prefill_pb2.PrefillEvent] = RequestKind(
            "/baton.v1.Prefill/Run",
            self._run,
            lambda item: item.open.context,
            lambda key, ended: prefill_pb2.PrefillEvent(key=key, ended=ended),
        )

    async def Serve(
        self, request_iterator: AsyncIterator[prefill_pb2.PrefillInputs], context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillEvents]:
        call = RouterCall(self._kind, self._calls, expired())
        async with aclosing(
            call.events(message.inputs async for message in request_iterator)
        ) as batches:
            async for events in batches:
                yield prefill_pb2.PrefillEvents(events=events)

    async def _run(
        self, opening: Opening[prefill_pb2.PrefillInput, prefill_pb2.PrefillEvent]
    ) -> None:
        key = opening.event_sender.key
        num_tokens = len(opening.input.open.request.prompt_token_ids)
        opening.event_sender.send(
            prefill_pb2.PrefillEvent(
                key=key,
                started=prefill_pb2.PrefillStarted(
                    terms=transfer_pb2.SourceTerms(
                        compatibility="source", page_size=64, num_tokens=num_tokens
                    )
                ),
            )
        )
        async for token_id in self._steps.tokens(1):
            opening.event_sender.send(
                prefill_pb2.PrefillEvent(
                    key=key,
                    first_token=prefill_pb2.PrefillFirstToken(
                        token=types_pb2.TokenChunk(token_ids=[token_id])
                    ),
                )
            )
        await opening.inbox.get(None, "the destination terms")
        opening.event_sender.send(prefill_pb2.PrefillEvent(key=key, sent=prefill_pb2.PrefillSent()))
        await opening.inbox.get(None, "the release")


class SourceDecode(decode_pb2_grpc.DecodeServicer):
    """Decode service that generates the other tokens, one at each step."""

    def __init__(self, steps: Steps, calls: CallTracker) -> None:
        self._steps = steps
        self._calls = calls
        self._kind: RequestKind[decode_pb2.DecodeInput, decode_pb2.DecodeEvent] = RequestKind(
            "/baton.v1.Decode/Generate",
            self._generate,
            lambda item: item.open.context,
            lambda key, ended: decode_pb2.DecodeEvent(key=key, ended=ended),
        )

    async def Serve(
        self, request_iterator: AsyncIterator[decode_pb2.DecodeInputs], context: Context
    ) -> AsyncIterator[decode_pb2.DecodeEvents]:
        call = RouterCall(self._kind, self._calls, expired())
        async with aclosing(
            call.events(message.inputs async for message in request_iterator)
        ) as batches:
            async for events in batches:
                yield decode_pb2.DecodeEvents(events=events)

    async def _generate(
        self, opening: Opening[decode_pb2.DecodeInput, decode_pb2.DecodeEvent]
    ) -> None:
        request = opening.input.open.request
        event_sender = DecodeEventSender(opening.event_sender, 1)
        event_sender.destination(transfer_pb2.DestinationTerms(session_id=request.request_id))
        await opening.inbox.get(None, "the first token")
        event_sender.committed(decode_pb2.DecodeCommitted())
        async for token_id in self._steps.tokens(request.max_tokens - 1):
            event_sender.generated((SampledToken(token_id),))
        event_sender.finished(decode_pb2.DecodeFinished(reason=types_pb2.FINISH_REASON_LENGTH))


def expired() -> Counter:
    """Return a counter of timeouts that stays empty."""
    return Counter("expired", "Waits that took too long.", registry=CollectorRegistry())


async def serve_source(model: Path, step_s: float) -> None:
    """Serve; print the addresses of prefill worker, decode worker and the relay's source."""
    config = json.loads((model / "config.json").read_text())
    steps = Steps(step_s)
    addresses = []
    for role in ("prefill", "decode"):
        server = GrpcServer(
            ServerOptions("127.0.0.1:0"),
            services=(),
            background_methods=ENDLESS_METHODS,
            metrics=RpcMetrics.create(CollectorRegistry()),
        )
        worker_pb2_grpc.add_WorkerServicer_to_server(SourceWorker(role, config), server.grpc)
        if role == "prefill":
            prefill_pb2_grpc.add_PrefillServicer_to_server(
                SourcePrefill(steps, server.calls), server.grpc
            )
        else:
            decode_pb2_grpc.add_DecodeServicer_to_server(
                SourceDecode(steps, server.calls), server.grpc
            )
        addresses.append(await server.start())
    plain, address = await serve_plainly(plain_source(steps))
    print(*addresses, address, flush=True)
    try:
        await steps.run()
    finally:
        await plain.stop(None)


async def serve_relay(source: str) -> None:
    """Print the address of the relay; serve."""
    async with grpc.aio.insecure_channel(source, options=PAST_PROXIES) as channel:
        server, address = await serve_plainly(relay(channel))
        print(address, flush=True)
        await server.wait_for_termination()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sides = parser.add_subparsers(dest="side", required=True)
    source = sides.add_parser("source")
    source.add_argument("model", type=Path)
    source.add_argument("step_s", type=float)
    relay = sides.add_parser("relay")
    relay.add_argument("source")
    flags = parser.parse_args()
    asyncio.run(
        serve_source(flags.model, flags.step_s)
        if flags.side == "source"
        else serve_relay(flags.source)
    )


if __name__ == "__main__":
    main()
