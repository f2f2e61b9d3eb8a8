"""The queue between a request and its client: everything in order, a bound, and an end."""

import asyncio

import pytest

from protos import generation_pb2
from router.request.response_queue import MAX_UNREAD, ResponseQueue
from runtime.errors import RequestAborted


def chunk(i: int) -> generation_pb2.GenerateResponse:
    return generation_pb2.GenerateResponse(chunk=generation_pb2.GenerateChunk(token_ids=[i]))


FINISH = generation_pb2.GenerateResponse(finish=generation_pb2.GenerateFinish())


async def test_everything_comes_out_in_order() -> None:
    responses, count = ResponseQueue(stall_limit_s=5), 5 * MAX_UNREAD

    async def fill() -> None:
        for i in range(count):
            await responses.put(chunk(i))
        await responses.put(FINISH)
        responses.close()

    async with asyncio.TaskGroup() as group:
        group.create_task(fill())
        out = [response async for response in responses]
    assert out == [*(chunk(i) for i in range(count)), FINISH]


async def test_a_client_that_does_not_read_is_noticed_and_a_finish_still_fits() -> None:
    responses = ResponseQueue(stall_limit_s=0.05)
    for i in range(MAX_UNREAD):
        await responses.put(chunk(i))
    with pytest.raises(RequestAborted, match=r"read nothing for 0\.05 s"):
        await responses.put(chunk(0))
    await responses.put(FINISH)
    responses.close()
    assert [response async for response in responses][-1] == FINISH


async def test_a_client_that_trickles_has_the_stall_limit_for_the_end_of_its_stream() -> None:
    responses = ResponseQueue(stall_limit_s=0.2)
    for i in range(MAX_UNREAD):
        await responses.put(chunk(i))
    responses.close()
    read: list[generation_pb2.GenerateResponse] = []

    async def trickle() -> None:
        async for response in responses:
            read.append(response)
            await asyncio.sleep(0.05)

    with pytest.raises(RequestAborted, match="not read the end of its stream"):
        await trickle()
    assert 0 < len(read) < MAX_UNREAD
