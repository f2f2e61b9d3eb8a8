"""The Adapters service of a leader: what its pool offers, loaded and unloaded while it serves."""

from typing import Any

import grpc

from pool.request.adapters import PoolAdapters
from protos import adapters_pb2 as pb
from protos import adapters_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class PoolAdaptersService(adapters_pb2_grpc.AdaptersServicer):
    """The gRPC servicer of the Adapters service of one pool."""

    def __init__(self, adapters: PoolAdapters) -> None:
        self._adapters = adapters

    async def LoadAdapter(
        self, request: pb.LoadAdapterRequest, context: Context
    ) -> pb.LoadAdapterResponse:
        return pb.LoadAdapterResponse(workers=[self._with(await self._adapters.load(request.name))])

    async def UnloadAdapter(
        self, request: pb.UnloadAdapterRequest, context: Context
    ) -> pb.UnloadAdapterResponse:
        return pb.UnloadAdapterResponse(
            workers=[self._with(await self._adapters.unload(request.name))]
        )

    async def ListAdapters(
        self, request: pb.ListAdaptersRequest, context: Context
    ) -> pb.ListAdaptersResponse:
        return pb.ListAdaptersResponse(workers=[self._with(*self._adapters.statuses())])

    def _with(self, *statuses: pb.AdapterStatus) -> pb.WorkerAdapters:
        return pb.WorkerAdapters(adapters=statuses, max_bytes=self._adapters.max_bytes)
