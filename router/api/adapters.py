"""`baton.v1.Adapters` of a router: has all workers load, unload or list adapters."""

from typing import Any

import grpc

from protos import adapters_pb2 as pb
from protos import adapters_pb2_grpc
from protos.adapters_pb2_grpc import AdaptersStub
from router.api.ask_workers import WorkerQuestion, ask_workers
from router.workers.directory import Directory

LOAD_TIMEOUT_S = 120.0  # per worker, which may wait for memory and reads files
TIMEOUT_S = 5.0

Context = grpc.aio.ServicerContext[Any, Any]


class AdaptersService(adapters_pb2_grpc.AdaptersServicer):
    """The gRPC servicer of the Adapters service in front of all workers of a router."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    async def LoadAdapter(
        self, request: pb.LoadAdapterRequest, context: Context
    ) -> pb.LoadAdapterResponse:
        workers = await self._ask(
            lambda channel: AdaptersStub(channel).LoadAdapter(request, timeout=LOAD_TIMEOUT_S)
        )
        return pb.LoadAdapterResponse(workers=workers)

    async def UnloadAdapter(
        self, request: pb.UnloadAdapterRequest, context: Context
    ) -> pb.UnloadAdapterResponse:
        workers = await self._ask(
            lambda channel: AdaptersStub(channel).UnloadAdapter(request, timeout=TIMEOUT_S)
        )
        return pb.UnloadAdapterResponse(workers=workers)

    async def ListAdapters(
        self, request: pb.ListAdaptersRequest, context: Context
    ) -> pb.ListAdaptersResponse:
        workers = await self._ask(
            lambda channel: AdaptersStub(channel).ListAdapters(request, timeout=TIMEOUT_S)
        )
        return pb.ListAdaptersResponse(workers=workers)

    async def _ask(self, question: WorkerQuestion[pb.WorkerAdapters]) -> list[pb.WorkerAdapters]:
        return await ask_workers(self._directory, pb.WorkerAdapters, question)
