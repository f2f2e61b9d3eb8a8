"""Memory that strangers can cost a router: peak memory of its process, under calls it must refuse
or bound."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from runtime.process.announce import Announcement
from tests.router.harness import write_model_dir
from tests.router.test_process import announced, router_process

MIB = 1 << 20
BOUND_MIB = (
    200  # beyond what the router needs to start; without bounds it is 16 MiB and more per call
)
NUM_CALLS = 48
GENERATE, CHECK = "/baton.v1.Generation/Generate", "/grpc.health.v1.Health/Check"
REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
TOKEN = "correct-horse-battery-staple"


def peak_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[Announcement]:
    """Start a router that requires tokens and has no workers."""
    model, path, tokens = (
        write_model_dir(tmp_path / "model"),
        tmp_path / "router.json",
        tmp_path / "tokens",
    )
    tokens.write_text(f"{TOKEN}\n")
    async with router_process(
        "--prefill",
        "127.0.0.1:1",
        "--decode",
        "127.0.0.1:2",
        "--model",
        str(model),
        "--listen",
        "127.0.0.1:0",
        "--announce",
        str(path),
        "--token-file",
        str(tokens),
        "--log-level",
        "error",
    ) as process:
        drained = asyncio.create_task(process.stderr.read()) if process.stderr is not None else None
        yield await announced(path)
        process.kill()
        if drained is not None:
            await drained


def channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(
        address,
        options=[("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)],
    )


def stub(own: grpc.aio.Channel) -> Any:  # noqa: ANN401 (published without types)
    return health_pb2_grpc.HealthStub(own)


async def one_call(
    address: str,
    method: str,
    message: bytes,
    metadata: Any = None,  # noqa: ANN401
    compression: grpc.Compression = grpc.Compression.NoCompression,
) -> grpc.StatusCode:
    async with channel(address) as own:
        start: Any = own.unary_stream(method)
        call = start(message, timeout=30, metadata=metadata, compression=compression)
        with suppress(grpc.aio.AioRpcError):
            async for _ in call:
                pass
        code: grpc.StatusCode = await call.code()
        return code


async def many(
    call: Callable[[], Awaitable[grpc.StatusCode]], num_calls: int = NUM_CALLS
) -> set[grpc.StatusCode]:
    return set(await asyncio.gather(*(call() for _ in range(num_calls))))


@pytest.mark.parametrize("mebibytes", [15.9, 64])
async def test_calls_without_a_token_cost_nothing(router: Announcement, mebibytes: float) -> None:
    message, before = bytes(round(mebibytes * MIB)), peak_mib(router.pid)
    codes = await many(lambda: one_call(router.address, GENERATE, message), 24)
    assert codes == {grpc.StatusCode.UNAUTHENTICATED}, "refused by what is in the metadata"
    assert peak_mib(router.pid) - before < 24, (
        "less than one MiB each: nothing was read but a window"
    )


@pytest.mark.parametrize("method", [CHECK, REFLECT])
async def test_messages_of_calls_that_need_no_token_are_bounded(
    router: Announcement, method: str
) -> None:
    message, before = bytes(round(15.9 * MIB)), peak_mib(router.pid)
    codes = await many(lambda: one_call(router.address, method, message))
    assert codes <= {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    }
    assert peak_mib(router.pid) - before < BOUND_MIB
    async with channel(router.address) as honest:
        answer = await stub(honest).Check(health_pb2.HealthCheckRequest(), timeout=30)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_token_does_not_open_all_memory(router: Announcement) -> None:
    """Its holders may send the largest message there is, all at once: what is read and what is held
    are bounded."""
    message, before = (
        b"\x1a" + b"\x80\x80\xf0\x07" + bytes(round(15.75 * MIB)),
        peak_mib(router.pid),
    )
    metadata = (("authorization", f"Bearer {TOKEN}"),)
    codes = await many(lambda: one_call(router.address, GENERATE, message, metadata))
    assert grpc.StatusCode.OK not in codes
    assert peak_mib(router.pid) - before < 400, "the pod has 1 GiB"


@pytest.mark.parametrize(
    "content",
    [
        b"\x2a\xf8\xff\xff\x07" + b"\x0a\x00" * 8_388_604,  # a chat of empty messages
        b"\x7a\xf8\xff\xff\x07\x0a\xf4\xff\xff\x07" + bytes(16_777_204),
    ],
)  # ids
async def test_requests_that_expand_when_parsed_cost_little_memory(
    router: Announcement, content: bytes
) -> None:
    """Parsed, the first one has 500 MiB, and holds everything up for a second."""
    before, metadata = peak_mib(router.pid), (("authorization", f"Bearer {TOKEN}"),)
    for compression in (grpc.Compression.Gzip, grpc.Compression.NoCompression):
        code = await one_call(router.address, GENERATE, content, metadata, compression)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert peak_mib(router.pid) - before < 100, (
        "it came whole, once as it is and once in gRPC's own memory"
    )


async def test_metadata_is_bounded(router: Announcement) -> None:
    before = peak_mib(router.pid)
    metadata = (("x", "y" * (64 << 10)),)
    codes = await many(lambda: one_call(router.address, GENERATE, b"", metadata))
    assert codes == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert peak_mib(router.pid) - before < 24


async def test_watches_of_health_are_bounded_and_probes_still_pass(router: Announcement) -> None:
    async with channel(router.address) as stranger:
        watches = [
            stub(stranger).Watch(health_pb2.HealthCheckRequest(service=f"{i}")) for i in range(200)
        ]
        codes = [await first_answer(call) for call in watches]
        assert codes.count(None) == 57, (
            "of 64, of which it leaves an eighth of what it has to others"
        )
        assert set(codes) == {None, grpc.StatusCode.RESOURCE_EXHAUSTED}
        answer = await stub(stranger).Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def first_answer(call: Any) -> grpc.StatusCode | None:  # noqa: ANN401
    """Return the status of the first response; None for a message."""
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        return error.code()
    return None
