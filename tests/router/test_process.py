"""`python -m router` as it is started: announce, serve, metrics, drain, and one clear line when it
cannot."""

import asyncio
import json
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from protos import generation_pb2_grpc
from runtime.process.announce import Announcement, read_announcement
from runtime.rpc.client import wait_serving
from tests.router.harness import eventually, token_request, write_model_dir
from tests.support.models.hostile_grammars import never_compiled
from tests.support.router.fake_workers import (
    Fabric,
    FakeDecode,
    FakePrefill,
    Journal,
    expected_tokens,
)


@asynccontextmanager
async def router_process(*flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", *flags, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def announced(path: Path) -> Announcement:
    await eventually(path.exists, "no announcement", within_s=60)
    announcement = read_announcement(path)
    assert announcement is not None
    return announcement


async def test_it_serves_drains_and_ends_with_zero(tmp_path: Path) -> None:
    fabric, journal = Fabric(), Journal()
    prefill, decode = FakePrefill("p", fabric, journal), FakeDecode("d", fabric, journal)
    await asyncio.gather(prefill.start(), decode.start())
    decode.token_pause_s = 0.01
    model, path = write_model_dir(tmp_path / "model"), tmp_path / "router.json"
    settings = tmp_path / "baton.toml"
    settings.write_text(
        f'[router]\nprefill = ["{prefill.address}"]\ndecode = ["{decode.address}"]\n'
    )
    async with router_process(
        "--config",
        str(settings),
        "--model",
        str(model),
        "--listen",
        "127.0.0.1:0",
        "--metrics-port",
        "0",
        "--announce",
        str(path),
    ) as process:
        announcement = await announced(path)
        assert announcement.pid == process.pid
        async with grpc.aio.insecure_channel(announcement.address) as channel:
            await wait_serving(channel, "baton.v1.Generation", timeout_s=60)
            stub = generation_pb2_grpc.GenerationStub(channel)
            stream = stub.Generate(token_request([3], max_tokens=60)).__aiter__()
            token_ids = list((await anext(stream)).chunk.token_ids)
            url = f"http://127.0.0.1:{announcement.metrics_port}/metrics"
            page = await asyncio.to_thread(
                lambda: urllib.request.urlopen(url, timeout=30).read().decode()
            )
            assert "baton_ttft_seconds_count 1.0" in page
            process.send_signal(signal.SIGTERM)
            token_ids += [
                token_id async for response in stream for token_id in response.chunk.token_ids
            ]
            assert token_ids == expected_tokens([3], 60), (
                "what runs is finished before the process ends"
            )
        assert await process.wait() == 0
    assert not prefill.open_requests + decode.open_requests
    await asyncio.gather(prefill.die(), decode.die())


async def test_it_ends_within_its_drain_while_grammars_compile(tmp_path: Path) -> None:
    """Nothing can interrupt a compilation but the end of its process."""
    fabric, journal = Fabric(), Journal()
    prefill, decode = FakePrefill("p", fabric, journal), FakeDecode("d", fabric, journal)
    await asyncio.gather(prefill.start(), decode.start())
    model, path = write_model_dir(tmp_path / "model"), tmp_path / "router.json"
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps({**config, "eos_token_id": 0})
    )  # in its vocabulary: texts can end
    flags = (
        "--prefill",
        prefill.address,
        "--decode",
        decode.address,
        "--model",
        str(model),
        "--listen",
        "127.0.0.1:0",
        "--drain-s",
        "1",
        "--announce",
        str(path),
    )
    async with (
        router_process(*flags) as process,
        grpc.aio.insecure_channel((await announced(path)).address) as channel,
    ):
        await wait_serving(channel, "baton.v1.Generation", timeout_s=60)
        calls = []
        for number in range(8):
            request = token_request([3])
            request.structured_output.json_schema = never_compiled(str(number)).text
            calls.append(generation_pb2_grpc.GenerationStub(channel).Generate(request))
        await asyncio.sleep(0.5)
        assert not all(call.done() for call in calls), "they compile, or wait for their turn"
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(15):
            assert await process.wait() == 0
        for call in calls:
            call.cancel()
    await asyncio.gather(prefill.die(), decode.die())


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--decode", "h:1", "--model", "."], "router: --prefill must be given"),
        (["--prefill", "h:1", "--decode", "nowhere", "--model", "."], "HOST:PORT"),
        (
            [
                "--prefill",
                "h:1",
                "--decode",
                "h:2",
                "--model",
                "/nowhere",
                "--log-level",
                "warning",
            ],
            "/nowhere does not exist; --model takes",
        ),
        (
            [
                "--prefill",
                "h:1",
                "--decode",
                "h:2",
                "--model",
                ".",
                "--max-connection-age-s",
                "2592000",
            ],
            "max_connection_age_s: Input should be less than or equal to 86400",
        ),
        (
            [
                "--prefill",
                "h:1",
                "--decode",
                "h:2",
                "--model",
                ".",
                "--otel-endpoint",
                "foo",
                "--check-settings",
            ],
            "otel_endpoint must be like",
        ),
        (
            ["--prefill", "h:1", "--decode", "h:2", "--model", ".", "--log-level", "loud"],
            "log level",
        ),
        (
            ["--prefill", "h:1", "--decode", "h:2", "--model", ".", "--salt-by-client"],
            "salt_by_client needs token_file",
        ),
        (
            ["--prefill", "h:1", "--decode", "h:2", "--model", ".", "--tenants-from", "gate"],
            "tenants_from needs token_file",
        ),
    ],
)
async def test_an_invalid_configuration_is_one_line(flags: list[str], line: str) -> None:
    async with router_process("--log-level", "error", *flags) as process:
        _, stderr = await process.communicate()
        assert process.returncode == 2
        assert line in stderr.decode()
        assert len(stderr.decode().strip().splitlines()) == 1


async def test_a_place_to_announce_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    """The server has started by then, and is stopped."""
    model = write_model_dir(tmp_path / "model")
    async with router_process(
        "--log-level",
        "error",
        "--prefill",
        "127.0.0.1:1",
        "--decode",
        "127.0.0.1:2",
        "--model",
        str(model),
        "--listen",
        "127.0.0.1:0",
        "--announce",
        "/nowhere/x",
    ) as process:
        _, stderr = await asyncio.wait_for(process.communicate(), 120)
    assert (process.returncode, stderr) == (
        2,
        b"router: cannot write /nowhere/x: No such file or directory\n",
    )
