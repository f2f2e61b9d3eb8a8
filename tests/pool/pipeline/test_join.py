"""Reports of a rank that joins: none is lost, and all follow the hello."""

import asyncio
from typing import Any, cast

from pool.pipeline.join import JoinCall, JoinStream
from protos import pipeline_pb2 as pb


class SlowCall:
    """A Join call whose writes complete only when the test lets them."""

    def __init__(self) -> None:
        self.may_write = asyncio.Event()
        self.is_written = asyncio.Event()
        self.is_half_closed = asyncio.Event()
        self.written: list[pb.JoinRequest] = []
        self.is_cancelled = False

    async def write(self, request: pb.JoinRequest) -> None:
        await self.may_write.wait()
        self.written.append(request)
        self.is_written.set()

    async def done_writing(self) -> None:
        self.is_half_closed.set()

    def cancel(self) -> None:
        self.is_cancelled = True


def stream_over(call: SlowCall) -> JoinStream:
    return JoinStream(cast("JoinCall", cast("Any", call)), pb.StageHello(rank=1))


async def test_a_report_before_the_hello_is_written_follows_it() -> None:
    """A leader that misses `StageReady` dismisses its pool after 30 s."""
    call = SlowCall()
    async with stream_over(call) as stream:
        stream.send(pb.JoinRequest(leaving=pb.Leaving(grace_s=1.0)))
        stream.end()
        assert not stream.is_open
        call.may_write.set()
        await asyncio.wait_for(call.is_half_closed.wait(), 5)
        assert stream.is_open
    kinds = [request.WhichOneof("event") for request in call.written]
    assert kinds == ["hello", "leaving"]
    assert call.is_cancelled


async def test_a_report_after_the_block_is_dropped() -> None:
    call = SlowCall()
    call.may_write.set()
    async with stream_over(call) as stream:
        await asyncio.wait_for(call.is_written.wait(), 5)
    stream.send(pb.JoinRequest(leaving=pb.Leaving(grace_s=1.0)))
    await asyncio.sleep(0)
    assert [request.WhichOneof("event") for request in call.written] == ["hello"]
