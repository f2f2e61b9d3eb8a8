"""Questions of operators that every worker of a router answers for itself."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol, TypeVar

import grpc

from protos import adapters_pb2, caches_pb2
from router.workers.directory import Directory
from router.workers.worker import Worker

AnswerT = TypeVar("AnswerT", adapters_pb2.WorkerAdapters, caches_pb2.WorkerCache)
PartT_co = TypeVar("PartT_co", covariant=True)


class WorkersAnswer(Protocol[PartT_co]):
    """Response of a worker, which answers for itself, or of a router, for all its workers."""

    @property
    def workers(self) -> Iterable[PartT_co]: ...


WorkerQuestion = Callable[[grpc.aio.Channel], Awaitable[WorkersAnswer[AnswerT]]]


async def ask_workers(
    directory: Directory, empty: Callable[[], AnswerT], question: WorkerQuestion[AnswerT]
) -> list[AnswerT]:
    """Ask all workers at once; the failure of one is part of its answer.

    `question` asks over a worker's channel. A worker of both roles is one worker.
    """
    workers = {worker.address: worker for worker in directory.workers}
    return await asyncio.gather(*(_ask(worker, empty, question) for worker in workers.values()))


async def _ask(
    worker: Worker, empty: Callable[[], AnswerT], question: WorkerQuestion[AnswerT]
) -> AnswerT:
    answer = empty()
    try:
        for each in (await question(worker.channel)).workers:
            answer.MergeFrom(each)
    except grpc.aio.AioRpcError as error:
        answer.error = error.details() or error.code().name
    answer.role, answer.address = worker.role, worker.address
    return answer
