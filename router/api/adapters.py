"""`baton.v1.Adapters` of a router: has all workers load, unload or list adapters."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc

from protos import adapters_pb2 as pb
from protos import adapters_pb2_grpc
from protos.adapters_pb2_grpc import AdaptersStub
from router.workers.directory import Directory
from router.workers.worker import Worker

if TYPE_CHECKING:  # used in annotations only: the type exists only in the stubs
    from protos.adapters_pb2_grpc import AdaptersAsyncStub

LOAD_TIMEOUT_S = 120.0  # per worker, which may wait for memory and reads files
TIMEOUT_S = 5.0

Context = grpc.aio.ServicerContext[Any, Any]
_AdaptersAnswer = pb.LoadAdapterResponse | pb.UnloadAdapterResponse | pb.ListAdaptersResponse


class AdaptersService(adapters_pb2_grpc.AdaptersServicer):
    """The gRPC servicer of the Adapters service in front of all workers of a router.

    Each worker answers for itself: the failure of one is part of the answer.
    """

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    async def LoadAdapter(
        self, request: pb.LoadAdapterRequest, context: Context
    ) -> pb.LoadAdapterResponse:
        return pb.LoadAdapterResponse(
            workers=await self._ask(lambda stub: stub.LoadAdapter(request, timeout=LOAD_TIMEOUT_S))
        )

    async def UnloadAdapter(
        self, request: pb.UnloadAdapterRequest, context: Context
    ) -> pb.UnloadAdapterResponse:
        return pb.UnloadAdapterResponse(
            workers=await self._ask(lambda stub: stub.UnloadAdapter(request, timeout=TIMEOUT_S))
        )

    async def ListAdapters(
        self, request: pb.ListAdaptersRequest, context: Context
    ) -> pb.ListAdaptersResponse:
        return pb.ListAdaptersResponse(
            workers=await self._ask(lambda stub: stub.ListAdapters(request, timeout=TIMEOUT_S))
        )

    async def _ask(
        self, question: "Callable[[AdaptersAsyncStub], Awaitable[_AdaptersAnswer]]"
    ) -> list[pb.WorkerAdapters]:
        # A worker of both roles is one worker.
        workers = {worker.address: worker for worker in self._directory.workers}
        return await asyncio.gather(*(_answer(worker, question) for worker in workers.values()))


async def _answer(
    worker: Worker, question: "Callable[[AdaptersAsyncStub], Awaitable[_AdaptersAnswer]]"
) -> pb.WorkerAdapters:
    answer = pb.WorkerAdapters()
    try:
        answered = await question(AdaptersStub(worker.channel))
        for each in answered.workers:
            answer.MergeFrom(each)
    except grpc.aio.AioRpcError as error:
        answer.error = error.details() or error.code().name
    answer.role, answer.address = worker.role, worker.address
    return answer
