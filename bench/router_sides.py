"""What `bench.router` puts before and behind a router, each a process: `python -m bench.router_sides source|relay`.

`source` plays the workers behind a router and, on a port of its own, the service behind a plain relay. Nothing
computes: every stream gets one token at each of the same moments, as from a pool's steps. `relay` is the plain one:
whatever comes from the source goes to the client.
"""

import argparse
import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from decode.steps import StepFeeds, StepOutlet
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
from runtime.metrics import RpcMetrics
from runtime.server import GrpcServer, ServerOptions

TOKENS = range(300, 500)  # ids of plain words
ROOM = 1 << 20  # of everything that a worker counts

Context = grpc.aio.ServicerContext[Any, Any]


class Steps:
    """The moments at which every stream gets a token."""

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


Generate = Callable[[generation_pb2.GenerateRequest, Context], AsyncIterator[generation_pb2.GenerateResponse]]


def plain_source(steps: Steps) -> Generate:
    """The service behind the relay."""

    async def generate(request: generation_pb2.GenerateRequest,
                       context: Context) -> AsyncIterator[generation_pb2.GenerateResponse]:
        async for token_id in steps.tokens(request.stop.max_tokens):
            yield generation_pb2.GenerateResponse(
                request_id=request.request_id,
                chunk=generation_pb2.GenerateChunk(token_ids=[token_id], text=" word"))

    return generate


def relay(source: grpc.aio.Channel) -> Generate:
    """The service in the middle: what the source sends goes on."""
    stub = generation_pb2_grpc.GenerationStub(source)

    async def generate(request: generation_pb2.GenerateRequest,
                       context: Context) -> AsyncIterator[generation_pb2.GenerateResponse]:
        async for response in stub.Generate(request):
            yield response

    return generate


async def serve_plainly(generate: Generate) -> tuple[grpc.aio.Server, str]:
    """The server, which lives as long as it is kept, and its address."""
    method = grpc.unary_stream_rpc_method_handler(
        generate, request_deserializer=generation_pb2.GenerateRequest.FromString,
        response_serializer=generation_pb2.GenerateResponse.SerializeToString)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((
        grpc.method_handlers_generic_handler("baton.v1.Generation", {"Generate": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


class SourceWorker(worker_pb2_grpc.WorkerServicer):
    """A worker with room for everything."""

    def __init__(self, role: str, model: Mapping[str, Any]) -> None:
        """`model`: its config.json."""
        self._info = worker_pb2.WorkerInfo(
            role=role, incarnation=role, architecture=model["architectures"][0], vocab_size=model["vocab_size"],
            num_layers=model["num_hidden_layers"], max_context_tokens=model["max_position_embeddings"],
            compatibility="source", page_size=64, pages_total=ROOM,
            max_running_requests=ROOM, max_queued_requests=ROOM, stages=["0-1"])

    async def Watch(self, request: worker_pb2.WatchRequest,
                    context: Context) -> AsyncIterator[worker_pb2.WatchResponse]:
        yield worker_pb2.WatchResponse(info=self._info)
        while True:
            yield worker_pb2.WatchResponse(load=worker_pb2.WorkerLoad(serving=True, pages_free=ROOM))
            await asyncio.sleep(request.interval_s)

    async def FlushCache(self, request: worker_pb2.FlushCacheRequest,
                         context: Context) -> worker_pb2.FlushCacheResponse:
        return worker_pb2.FlushCacheResponse()


class SourcePrefill(prefill_pb2_grpc.PrefillServicer):
    """Draws the first token at the next step."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    async def Run(self, request_iterator: AsyncIterator[prefill_pb2.RunRequest],
                  context: Context) -> AsyncIterator[prefill_pb2.RunResponse]:
        request = (await anext(request_iterator)).request
        yield prefill_pb2.RunResponse(started=prefill_pb2.PrefillStarted(terms=transfer_pb2.SourceTerms(
            compatibility="source", page_size=64, num_tokens=len(request.prompt_token_ids))))
        async for token_id in self._steps.tokens(1):
            yield prefill_pb2.RunResponse(first_token=prefill_pb2.PrefillFirstToken(
                token=types_pb2.TokenChunk(token_ids=[token_id])))
        await anext(request_iterator)
        yield prefill_pb2.RunResponse(sent=prefill_pb2.PrefillSent())
        async for _ in request_iterator:
            pass


class SourceDecode(decode_pb2_grpc.DecodeServicer):
    """Draws the others, one at each step."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._feeds = StepFeeds()

    async def Steps(self, request: decode_pb2.StepsRequest,
                    context: Context) -> AsyncIterator[decode_pb2.StepsResponse]:
        with self._feeds.opened(request.steps_id) as feed:
            async for message in feed.messages():
                yield message

    async def Generate(self, request_iterator: AsyncIterator[decode_pb2.DecodeRequest],
                       context: Context) -> AsyncIterator[decode_pb2.DecodeResponse]:
        opening = (await anext(request_iterator)).open
        terms = transfer_pb2.DestinationTerms(session_id=opening.request.request_id)
        yield decode_pb2.DecodeResponse(destination=terms)
        await anext(request_iterator)
        outlet = StepOutlet(await self._feeds.named(opening.steps_id), opening.steps_key, 1)
        outlet.committed(decode_pb2.DecodeCommitted())
        async for token_id in self._steps.tokens(opening.request.max_tokens - 1):
            outlet.drawn(types_pb2.TokenChunk(token_ids=[token_id]))
        outlet.finished(decode_pb2.DecodeFinished(reason=types_pb2.FINISH_REASON_LENGTH))
        async for _ in request_iterator:
            pass


async def serve_source(model: Path, step_s: float) -> None:
    """Prints the addresses of the prefill worker, the decode worker and the relay's source."""
    config, steps = json.loads((model / "config.json").read_text()), Steps(step_s)
    addresses = []
    for role in ("prefill", "decode"):
        server = GrpcServer(ServerOptions("127.0.0.1:0"), services=(), metrics=RpcMetrics.create(CollectorRegistry()))
        worker_pb2_grpc.add_WorkerServicer_to_server(SourceWorker(role, config), server.grpc)
        if role == "prefill":
            prefill_pb2_grpc.add_PrefillServicer_to_server(SourcePrefill(steps), server.grpc)
        else:
            decode_pb2_grpc.add_DecodeServicer_to_server(SourceDecode(steps), server.grpc)
        addresses.append(await server.start())
    plain, address = await serve_plainly(plain_source(steps))
    print(*addresses, address, flush=True)
    try:
        await steps.run()
    finally:
        await plain.stop(None)


async def serve_relay(source: str) -> None:
    """Prints its address."""
    async with grpc.aio.insecure_channel(source) as channel:
        server, address = await serve_plainly(relay(channel))
        print(address, flush=True)
        await server.wait_for_termination()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sides = parser.add_subparsers(dest="side", required=True)
    source = sides.add_parser("source")
    source.add_argument("model", type=Path)
    source.add_argument("step_s", type=float)
    relay = sides.add_parser("relay")
    relay.add_argument("source")
    flags = parser.parse_args()
    asyncio.run(serve_source(flags.model, flags.step_s) if flags.side == "source" else serve_relay(flags.source))


if __name__ == "__main__":
    main()
