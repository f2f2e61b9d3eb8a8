"""`baton.v1.Caches` of a router: what the prefix caches of all workers hold."""

from typing import Any

import grpc

from protos import caches_pb2 as pb
from protos import caches_pb2_grpc
from protos.caches_pb2_grpc import CachesStub
from router.api.ask_workers import ask_workers
from router.workers.directory import Directory

TIMEOUT_S = 5.0

Context = grpc.aio.ServicerContext[Any, Any]


class CachesService(caches_pb2_grpc.CachesServicer):
    """The gRPC servicer of the Caches service in front of all workers of a router."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    async def ListCaches(
        self, request: pb.ListCachesRequest, context: Context
    ) -> pb.ListCachesResponse:
        workers = await ask_workers(
            self._directory,
            pb.WorkerCache,
            lambda channel: CachesStub(channel).ListCaches(request, timeout=TIMEOUT_S),
        )
        return pb.ListCachesResponse(workers=workers)
