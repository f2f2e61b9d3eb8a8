"""A scripted Generation service, for testing clients over real gRPC."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from protos import generation_pb2 as pb
from protos import generation_pb2_grpc, types_pb2
from runtime.errors import CapacityError, FieldViolation, InternalError, InvalidRequestError
from runtime.observe.log import rebind
from runtime.observe.metrics.calls import RpcMetrics
from runtime.rpc.server import GrpcServer, ServerOptions
from runtime.security.access import OPEN_SERVER, ServerSecurity

SERVICE = "baton.v1.Generation"
Context = grpc.aio.ServicerContext[Any, Any]


class EchoGeneration(generation_pb2_grpc.GenerationServicer):
    """Says the prompt back, one word per chunk. Some prompts have a meaning of their own:

    "hang": sends one chunk, then nothing; "full": refuses with CapacityError; "bug": fails with a
    foreign exception.
    """

    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.running: set[str] = set()
        self.started = asyncio.Event()
        self.ended = asyncio.Event()

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        request_id = request.request_id or "chosen-by-server"
        rebind(request_id=request_id)
        self.requests.append(request)
        self._refuse(request)
        self.running.add(request_id)
        self.started.set()
        try:
            words = (
                request.text.split()
                or [str(i) for i in request.token_ids.ids]
                or [m.content for m in request.chat.messages]
            )
            for i, word in enumerate(words):
                usage = pb.Usage(prompt_tokens=len(words), completion_tokens=i + 1)
                chunk = pb.GenerateChunk(token_ids=[i], text=f"{word} ", usage=usage)
                yield pb.GenerateResponse(request_id=request_id, chunk=chunk)
                if word == "hang":
                    await asyncio.sleep(60)
            yield pb.GenerateResponse(
                request_id=request_id,
                finish=pb.GenerateFinish(
                    reason=types_pb2.FINISH_REASON_STOP,
                    stop_token_id=7,
                    usage=pb.Usage(prompt_tokens=len(words), completion_tokens=len(words)),
                    timings=types_pb2.Timings(prefill_s=0.25, total_s=0.5, transfer_exposed_s=0.0),
                ),
            )
        finally:
            self.running.discard(request_id)
            self.ended.set()

    def _refuse(self, request: pb.GenerateRequest) -> None:
        if request.HasField("sampling") and request.sampling.temperature < 0:
            raise InvalidRequestError(
                FieldViolation("sampling.temperature", "must be from 0 to 100, got -1")
            )
        if request.text == "full":
            raise CapacityError(
                "the queue holds 4 requests, no more", resource="queue", retry_after_s=2.5
            )
        if request.text == "bug":
            raise ZeroDivisionError("secret text")
        if request.text == "invariant":
            raise InternalError("secret text")

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        return pb.AbortResponse(aborted=[i for i in request.request_ids if i in self.running])

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        return pb.GetModelInfoResponse(
            model="echo",
            architecture="Echo",
            vocab_size=16,
            max_context_tokens=64,
            num_layers=1,
            eos_token_ids=[7],
            has_tokenizer=True,
            revision="abc",
        )

    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.GetLoadResponse:
        return pb.GetLoadResponse(running_requests=len(self.running), prefill_workers=3)

    async def GetClusterStatus(
        self, request: pb.GetClusterStatusRequest, context: Context
    ) -> pb.GetClusterStatusResponse:
        worker = pb.WorkerStatus(
            role="decode",
            address="127.0.0.1:1",
            serving=False,
            reason="warming up",
            stages=["0-4", "4-8"],
            pages_total=10,
            pages_free=9,
        )
        return pb.GetClusterStatusResponse(
            model="echo", running_requests=len(self.running), workers=[worker]
        )

    async def FlushCaches(
        self, request: pb.FlushCachesRequest, context: Context
    ) -> pb.FlushCachesResponse:
        return pb.FlushCachesResponse(
            workers=[
                pb.FlushedCache(role="prefill", address="127.0.0.1:1", pages=3),
                pb.FlushedCache(role="decode", address="127.0.0.1:2", error="away"),
            ]
        )


async def serve_echo(
    servicer: EchoGeneration,
    *,
    security: ServerSecurity = OPEN_SERVER,
    **options: Any,  # noqa: ANN401
) -> tuple[GrpcServer, str]:
    """Start an echo router and return it with its address; `options` are those of ServerOptions."""
    server = GrpcServer(
        ServerOptions(**{"listen": "127.0.0.1:0", **options}),
        services=(SERVICE,),
        metrics=RpcMetrics.create(CollectorRegistry()),
        security=security,
    )
    generation_pb2_grpc.add_GenerationServicer_to_server(servicer, server.grpc)
    address = await server.start()
    await server.health.set_serving(SERVICE)
    return server, address
