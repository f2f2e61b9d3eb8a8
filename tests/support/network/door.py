"""A server with certificates and tokens, and its callers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from cryptography import x509
from prometheus_client import CollectorRegistry

from protos import generation_pb2 as pb
from protos import generation_pb2_grpc, worker_pb2, worker_pb2_grpc
from runtime.observe.metrics.calls import RpcMetrics
from runtime.rpc.server import GrpcServer, ServerOptions
from runtime.rpc.status import error_from_rpc
from runtime.security.access import ServerSecurity
from tests.support.router.fake_workers import CachelessWorker
from tests.support.router.generation import SERVICE, EchoGeneration


class Watched(CachelessWorker):
    """Says which certificate its caller shows."""

    async def Watch(
        self,
        request: worker_pb2.WatchRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[worker_pb2.WatchResponse]:
        (pem,) = context.auth_context().get("x509_pem_cert", [b""])
        serial_number = x509.load_pem_x509_certificate(bytes(pem)).serial_number if pem else 0
        yield worker_pb2.WatchResponse(info=worker_pb2.WorkerInfo(incarnation=str(serial_number)))


@asynccontextmanager
async def serving(security: ServerSecurity) -> AsyncIterator[str]:
    """Run an echo server with `security`; yield its address."""
    server = GrpcServer(
        ServerOptions(listen="127.0.0.1:0"),
        services=(SERVICE,),
        security=security,
        metrics=RpcMetrics.create(CollectorRegistry()),
    )
    generation_pb2_grpc.add_GenerationServicer_to_server(EchoGeneration(), server.grpc)
    worker_pb2_grpc.add_WorkerServicer_to_server(Watched(), server.grpc)
    yield await server.start()
    await server.drain(grace_s=0)


async def ask(channel: grpc.aio.Channel, *metadata: tuple[str, str]) -> str:
    """Return the model's name; raise the typed error of the status."""
    stub = generation_pb2_grpc.GenerationStub(channel)
    try:
        info: pb.GetModelInfoResponse = await stub.GetModelInfo(
            pb.GetModelInfoRequest(), metadata=metadata, timeout=60
        )
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from None
    return info.model


def plain_client(
    address: str, ca: bytes, key: bytes | None = None, certificate: bytes | None = None
) -> grpc.aio.Channel:
    """Open a channel as an outside client does."""
    return grpc.aio.secure_channel(
        address,
        grpc.ssl_channel_credentials(ca, key, certificate),
        [("grpc.use_local_subchannel_pool", 1)],
    )
