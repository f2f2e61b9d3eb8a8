"""`baton load` against scripted servers: Baton's API, and VllmEngine's by its published stubs."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as vllm_grpc
from typer.testing import CliRunner

from baton.cli import app
from baton.load_plot import check_can_plot
from baton.values import ChatMessage, Query
from baton.vllm_client import AsyncVllmEngineClient
from runtime.errors import CapacityError, ConfigError, InvalidRequestError
from tests.support.router.generation import EchoGeneration, serve_echo


class ScriptedEngine(vllm_grpc.VllmEngineServicer):  # type: ignore[misc]  # the stubs have no types
    """An engine that counts up from the prompt's first token and refuses a prompt that begins with
    13."""

    def __init__(self) -> None:
        self.requests: list[Any] = []

    async def GetModelInfo(self, request: Any, context: Any) -> Any:  # noqa: ANN401
        return vllm.GetModelInfoResponse(
            served_model_name="counter",
            vocab_size=12,
            max_context_length=64,
            eos_token_ids=[0],
            architectures=["Counter"],
        )

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: ANN401
        self.requests.append(request)
        first, count = request.tokenized.input_ids[0], request.sampling_params.max_tokens
        if first == 13:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        for index in range(count):
            yield vllm.GenerateResponse(
                chunk=vllm.GenerateStreamChunk(
                    token_ids=[first + index], prompt_tokens=1, completion_tokens=index + 1
                )
            )
        yield vllm.GenerateResponse(
            complete=vllm.GenerateComplete(
                finish_reason="length", prompt_tokens=1, completion_tokens=count
            )
        )


@asynccontextmanager
async def engine() -> AsyncIterator[tuple[ScriptedEngine, str]]:
    server, servicer = grpc.aio.server(), ScriptedEngine()
    vllm_grpc.add_VllmEngineServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield servicer, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def baton_load(*flags: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "baton",
        "load",
        *flags,
        env={**os.environ, "COLUMNS": "160"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


async def test_a_vllm_engine_is_loaded_and_the_run_is_plotted(tmp_path: Path) -> None:
    async with engine() as (servicer, address):
        code, out, err = await baton_load(
            "--api",
            "vllm",
            "--target",
            address,
            "--requests",
            "6",
            "--arrival",
            "burst",
            "--burst",
            "3",
            "--rate",
            "60",
            "--prompt-tokens",
            "uniform:2-5",
            "--output-tokens",
            "4",
            "--warm-up",
            "1",
            "--json",
            "--plot",
            str(tmp_path / "run.png"),
        )
    assert code == 0, err
    figures = json.loads(out)
    assert (figures["requests"], figures["failed"], figures["errors"]) == (6, 0, {})
    assert figures["output_tokens_per_s"] == pytest.approx(24 / figures["duration_s"])
    assert 0 < figures["ttft_s_p50"] <= figures["e2e_s_p50"]
    assert len(servicer.requests) == 7, "one of them to warm up"
    assert {request.sampling_params.max_tokens for request in servicer.requests} == {4}
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


async def test_a_trace_is_replayed_and_printed_as_a_table(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"at_s": 0, "prompt_tokens": 3, "output_tokens": 1}\n'
        '{"at_s": 0.2, "prompt_tokens": 5, "output_tokens": 1}\n'
    )
    servicer = EchoGeneration()
    server, address = await serve_echo(servicer)
    code, out, err = await baton_load("--target", address, "--trace", str(trace), "--warm-up", "0")
    await server.drain(grace_s=0)
    assert code == 0, err
    assert "2 requests" in out
    for row in ("time to first token", "time per output token", "gap between messages", "goodput"):
        assert row in out
    assert [len(request.token_ids.ids) for request in servicer.requests] == [3, 5]


async def test_a_trace_is_limited_by_requests_and_never_truncated(
    tmp_path: Path,
) -> None:
    """The echo's context is 64 tokens."""
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "Timestamp,Model,Request tokens,Response tokens\n0,m,3,1\n0.1,m,0,9\n0.2,m,99,1\n0.3,m,5,1\n"
    )
    servicer = EchoGeneration()
    server, address = await serve_echo(servicer)
    flags = ("--target", address, "--trace", str(trace), "--warm-up", "0")
    code, out, err = await baton_load(*flags)
    assert (code, out, servicer.requests) == (2, "", [])
    assert "1 of 3 requests are longer than the context of 64 tokens" in err
    assert (await baton_load(*flags, "--requests", "1"))[0] == 0
    assert [len(request.token_ids.ids) for request in servicer.requests] == [3]
    code, out, err = await baton_load(*flags, "--too-long", "skip")
    assert "requests skipped as longer than the context of 64 tokens: 1\n" in out
    assert "requests skipped as the trace has no response to them: 1\n" in out
    code, out, err = await baton_load(*flags, "--too-long", "cut", "--json")
    await server.drain(grace_s=0)
    figures = json.loads(out)
    assert (
        figures["requests"],
        figures["requests_cut"],
        figures["requests_unanswered_in_trace"],
    ) == (3, 1, 1)
    assert [len(request.token_ids.ids) for request in servicer.requests] == [3, 3, 5, 3, 63, 5]


async def test_each_run_has_prompts_of_its_own_and_its_warm_up_too() -> None:
    """Caches know none of them, unless a seed is given twice."""
    servicer = EchoGeneration()
    server, address = await serve_echo(servicer)
    flags = (
        "--target",
        address,
        "--requests",
        "2",
        "--rate",
        "50",
        "--prompt-tokens",
        "20",
        "--output-tokens",
        "1",
    )
    seeds = []
    for given in ((), (), ("--seed", "7"), ("--seed", "7")):
        code, out, err = await baton_load(*flags, "--warm-up", "2", "--json", *given)
        assert code == 0, err
        seeds.append(json.loads(out)["seed"])
    code, out, err = await baton_load(*flags, "--seed", "8")
    await server.drain(grace_s=0)
    prompts = [tuple(request.token_ids.ids) for request in servicer.requests]
    assert len(set(seeds)) == 3
    assert len(set(prompts[:12])) == 12
    assert set(prompts[12:16]) == set(prompts[8:12])
    assert "seed 8; a second run with it (--seed) may find its prompts in the caches" in out
    assert "prefix caches served 0 of 40 prompt tokens (0.0%)" in out


async def test_the_engine_client_speaks_token_ids_and_our_errors() -> None:
    async with engine() as (_, address), AsyncVllmEngineClient(address) as client:
        assert (await client.model_info()).max_context_tokens == 64
        with pytest.raises(CapacityError):
            [event async for event in client.generate(Query((13,)))]
        with pytest.raises(InvalidRequestError, match="token ids"):
            [event async for event in client.generate(Query((ChatMessage("user", "hello"),)))]


def test_missing_packages_and_options_are_reported_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"\.png, \.svg or \.pdf"):
        check_can_plot(tmp_path / "run.txt")
    with pytest.raises(ConfigError, match="no such folder"):
        check_can_plot(tmp_path / "none" / "run.png")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ConfigError, match=r"cannot write .*folder\.png"):
        check_can_plot(tmp_path / "folder.png")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"baton\[plot\]"):
        check_can_plot(tmp_path / "run.png")

    monkeypatch.setitem(sys.modules, "smg_grpc_proto.generated", None)
    with pytest.raises(ConfigError, match=r"baton\[vllm\]"):
        AsyncVllmEngineClient("127.0.0.1:1")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--slo-ttft", "-1"),
        ("--slo-ttft", "nan"),
        ("--slo-tpot", "inf"),
        ("--rate", "inf"),
        ("--speed", "nan"),
        ("--timeout", "inf"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(flag: str, value: str) -> None:
    done = CliRunner().invoke(app, ["load", flag, value])
    assert done.exit_code == 2
    assert f"Invalid value for '{flag}'" in done.stderr


async def test_turns_of_a_conversation_continue_the_response_before_them() -> None:
    async with engine() as (scripted, address):
        code, out, err = await baton_load(
            *("--api", "vllm", "--target", address, "--requests", "2", "--warm-up", "0"),
            *("--prompt-tokens", "4", "--output-tokens", "3", "--turns", "3", "--turn-tokens", "2"),
            *("--pause", "0.2", "--rate", "1000", "--seed", "1", "--json"),
        )
    assert code == 0, err
    prompts = sorted((tuple(each.tokenized.input_ids) for each in scripted.requests), key=len)
    assert [len(prompt) for prompt in prompts] == [4, 4, 9, 9, 14, 14]
    for prompt in prompts[2:]:
        before = next(
            each for each in prompts if len(each) == len(prompt) - 5 and prompt[:4] == each[:4]
        )
        first = before[0]
        assert prompt[:-2] == (*before, first, first + 1, first + 2)
    figures = json.loads(out)
    assert (figures["requests"], figures["failed"]) == (6, 0)
    assert [turn["requests"] for turn in figures["by_turn"]] == [2, 2, 2]
    assert figures["duration_s"] >= 0.4, "two pauses of 0.2 s"


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--turns", "3", "--trace", "x.jsonl"), "turns is for sampled requests, not for a trace"),
        (("--turns", "9", "--prompt-tokens", "4", "--turn-tokens", "2"), "fewer --turns"),
        (("--turns", "2", "--turn-tokens", "many"), "turn_tokens must be like"),
        (("--turns", "0"), "greater than or equal to 1"),
    ],
)
async def test_impossible_conversations_are_refused(flags: tuple[str, ...], reason: str) -> None:
    async with engine() as (scripted, address):
        code, _, err = await baton_load(
            *("--api", "vllm", "--target", address, "--output-tokens", "6", *flags)
        )
    assert code != 0
    assert reason in " ".join(err.replace("│", " ").split())
    assert scripted.requests == []


async def test_an_agents_conversation_goes_on_with_the_responses(tmp_path: Path) -> None:
    """The second prompt has the two whole blocks of the first, its last two tokens and the response;
    a third of another conversation begins when the first one has ended."""
    entry = {"t": 0.0, "in": 18, "out": 3, "hash_ids": [1, 2], "api_time": 1.0}
    later = {"t": 9.0, "in": 26, "out": 3, "hash_ids": [1, 2, 3], "api_time": 1.0}
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "".join(
            f"{json.dumps({'block_size': 8, 'requests': requests})}\n"
            for requests in ([entry, later], [entry])
        )
    )
    async with engine() as (scripted, address):
        code, out, err = await baton_load(
            *("--api", "vllm", "--target", address, "--warm-up", "0", "--trace", str(trace)),
            *("--users", "1", "--max-pause", "0.1", "--shrink", "2", "--json"),
        )
    assert code == 0, err
    first, second, third = (tuple(each.tokenized.input_ids) for each in scripted.requests)
    assert [len(first), len(second), len(third)] == [9, 13, 9]
    assert second[:10] == (*first, first[0])
    assert third != first
    figures = json.loads(out)
    assert [turn["requests"] for turn in figures["by_turn"]] == [2, 1]
    assert 0.1 <= figures["duration_s"] < 5
