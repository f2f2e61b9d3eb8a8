"""The TypeScript example of docs/client.md: its commands, type-checked, with a stream that breaks."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from protos import generation_pb2 as pb
from protos import types_pb2
from runtime.errors import UnavailableError
from tests.guides.extension import ROOT
from tests.support.router.generation import Context, EchoGeneration, serve_echo

LIMIT_S = 200.0
WORDS = ["3", "5", "7", "9", "11."]


class BreakingGeneration(EchoGeneration):
    """Breaks every stream after two tokens; one that is resumed continues where it broke."""

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.requests.append(request)
        first = len(request.resumed[0].ids)
        for token, word in list(enumerate(WORDS))[first : first + 2]:
            chunk = pb.GenerateChunk(token_ids=[token], text=f" {word}", compatibility="digest")
            yield pb.GenerateResponse(request_id="1", chunk=chunk)
        if first + 2 < len(WORDS):
            raise UnavailableError("the worker is lost")
        finish = pb.GenerateFinish(reason=types_pb2.FINISH_REASON_STOP)
        yield pb.GenerateResponse(request_id="1", finish=finish)


async def ran(folder: Path, *command: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        *command, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
    return process.returncode, output.decode()


async def install(folder: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("needs npm")
    code, output = await ran(folder, "npm", "install", "--no-audit", "--no-fund")
    if "ENOTFOUND" in output or "ECONNREFUSED" in output or "ETIMEDOUT" in output:
        pytest.skip("needs the npm registry")
    assert code == 0, output


@pytest.mark.long
async def test_the_example_resumes_at_the_next_router(tmp_path: Path) -> None:
    """With the copied protos and none of Baton's other files."""
    folder = tmp_path / "example"
    shutil.copytree(ROOT / "docs/examples/typescript", folder)
    shutil.copytree(ROOT / "protos/baton", folder / "protos/baton")
    await install(folder)
    for script in ("types", "build"):
        code, output = await ran(folder, "npm", "run", "-s", script)
        assert (code, output) == (0, "")
    generation = BreakingGeneration()
    servers = [await serve_echo(generation) for _ in range(2)]
    targets = ",".join(["127.0.0.1:1", *(address for _, address in servers)])
    code, output = await ran(folder, "node", "built/generate.js", targets)
    assert (code, output) == (0, " 3 5 7 9 11.\nFINISH_REASON_STOP\n")
    assert [list(each.resumed[0].ids) for each in generation.requests] == [[], [0, 1], [0, 1, 2, 3]]
    assert [list(each.resumed_from) for each in generation.requests] == [
        [""],
        ["digest"],
        ["digest"],
    ]
    assert len({each.sampling.seed for each in generation.requests}) == 1
    for server, _ in servers:
        await server.drain(grace_s=0)
    code, output = await ran(folder, "node", "built/generate.js", "127.0.0.1:1")
    assert code == 1
    assert output.startswith(f"\n{grpc.StatusCode.UNAVAILABLE.name}: ")
