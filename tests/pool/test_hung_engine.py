"""A worker whose engine hangs in a forward, as a process of its own."""

import asyncio
import sys
import time
from pathlib import Path

import grpc

from protos import prefill_pb2 as pb
from protos import prefill_pb2_grpc, types_pb2
from runtime.errors import UnavailableError
from runtime.process.announce import read_announcement
from runtime.rpc.client import open_channel, wait_serving
from runtime.rpc.status import error_from_status
from tests.support.models.checkpoints import make_checkpoint


async def next_event(
    call: "grpc.aio.StreamStreamCall[pb.PrefillInputs, pb.PrefillEvents]",
) -> pb.PrefillEvent:
    message = await call.read()
    assert isinstance(message, pb.PrefillEvents)
    (event,) = message.events
    return event


async def test_a_hung_engine_gives_its_requests_back_and_ends_its_process(tmp_path: Path) -> None:
    """They used to wait for their deadline, an hour by default, while the worker said that it
    serves."""
    model, path = make_checkpoint(tmp_path, "llama"), tmp_path / "announced.json"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.support.pool.hanging_worker",
        str(model),
        str(path),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(120):
            while (announcement := read_announcement(path)) is None:
                assert process.returncode is None
                await asyncio.sleep(0.05)
            async with open_channel(announcement.address) as channel:
                await wait_serving(channel, "baton.v1.Prefill", timeout_s=60)
                began_s = time.monotonic()
                request = types_pb2.EngineRequest(
                    request_id="r", prompt_token_ids=[1, 2, 3], max_tokens=4
                )
                call = prefill_pb2_grpc.PrefillStub(channel).Serve()
                await call.write(
                    pb.PrefillInputs(
                        inputs=[
                            pb.PrefillInput(
                                key=1,
                                open=pb.PrefillOpen(
                                    request=request,
                                    context=types_pb2.RequestContext(time_left_s=3600),
                                ),
                            )
                        ]
                    )
                )
                started, ended = await next_event(call), await next_event(call)
                assert started.HasField("started")
                error = error_from_status(ended.ended.SerializeToString())
                assert isinstance(error, UnavailableError)
                assert "the engine has been in one step for more than 2 s" in str(error)
            _, said = await process.communicate()
        assert time.monotonic() - began_s < 30, (
            "neither the drain nor the thread that hangs was waited for"
        )
        assert process.returncode == 1, said.decode()
        assert (
            "prefill: this worker cannot continue: the engine has been in one step" in said.decode()
        )
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
