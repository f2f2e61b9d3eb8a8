"""The mixed load: figures computed from message times, and vLLM's side over a fake package."""

import argparse
import asyncio
import random
import sys
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import pytest

from bench.mixed import MeasuredTurn, MixedRequest, missed, run_turn, summarize
from bench.mixed_sides import vllm_side
from runtime.errors import BatonError, UnavailableError

STAND_IN = '''
import time
from types import SimpleNamespace

class SamplingParams(SimpleNamespace):
    pass

class LLM:
    """Two tokens of a prompt a step, then one of the answer; says how it was built by its first request's name."""
    def __init__(self, **settings):
        assert settings["max_num_batched_tokens"] == 512, settings
        self.llm_engine, self.requests = self, {}
    def add_request(self, name, prompt, parameters):
        self.requests[name] = [len(prompt["prompt_token_ids"]) // 2, parameters.max_tokens]
    def abort_request(self, names):
        for name in names:
            self.requests.pop(name, None)
    def has_unfinished_requests(self):
        return bool(self.requests)
    def step(self):
        time.sleep(0.001)
        found = []
        for name, left in list(self.requests.items()):
            left[0 if left[0] else 1] -= 1
            ids = [] if left[0] else [7]
            found.append(SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=ids)]))
            if not left[1]:
                del self.requests[name]
        return found
'''


def answer(sent_s: float, *messages: tuple[float, int], failed: bool = False) -> MixedRequest:
    return MixedRequest(sent_s, list(messages), failed)


def turn(gap_s: float, ttft_s: float, *, lost: bool = False) -> MeasuredTurn:
    """Return two streams of one token per `gap_s` from 0 to 10 s; the first half second does not
    count."""
    times = [index * gap_s for index in range(int(10 / gap_s) + 1)]
    streams = [answer(-1.0, *((at_s, 1) for at_s in times)) for _ in range(2)]
    return MeasuredTurn(streams, [answer(3.0, (3.0 + ttft_s, 1), failed=lost)], 0.5, 10.0)


def test_figures_count_gaps_and_tokens_within_the_window() -> None:
    stream = answer(0.0, (0.9, 1), (1.1, 1), (1.5, 3), (2.5, 1), (3.5, 1))
    figures = MeasuredTurn([stream], [answer(1.0, (2.25, 1))], 1.0, 3.0).figures()
    assert figures["decode"] == pytest.approx(5 / 2.0)
    assert figures["itl_p50"] == pytest.approx(0.4)  # 0.2, 0.4 and 1.0
    assert figures["itl_max"] == pytest.approx(1.0)
    assert figures["ttft"] == pytest.approx(1.25)
    assert figures["lost"] == 0


def test_ratios_are_taken_turn_by_turn_and_held_against_their_bars() -> None:
    values = summarize(
        {
            "baton": [turn(0.02, 3.0), turn(0.04, 6.0), turn(0.02, 3.0)],
            "vllm": [turn(0.5, 3.0), turn(0.5, 12.0), turn(0.5, 1.5)],
        }
    )
    assert values["itl_p99_ratio"] == pytest.approx(0.04)
    assert values["ttft_ratio"] == pytest.approx(1.0)
    assert values["decode_ratio"] == pytest.approx(25, rel=0.05)
    assert missed(values) == []
    slow = summarize({"baton": [turn(0.1, 3.0, lost=True)], "vllm": [turn(0.2, 1.0)]})
    assert [line.split()[0] for line in missed(slow)] == ["itl_p99", "decode", "ttft", "1"]


def test_one_side_alone_has_figures_and_no_ratios() -> None:
    values = summarize({"vllm": [turn(0.5, 3.0)]})
    assert values["vllm_ttft"] == pytest.approx(3.0)
    assert not any(name.endswith("ratio") for name in values)
    assert missed(values) == []


class ScriptedSide:
    """A token every millisecond; every second long prompt ends with an error, the others' answers
    with two tokens."""

    def __init__(self) -> None:
        self.num_running = 0
        self.prompts: list[int] = []

    async def generate(self, prompt: Sequence[int], max_tokens: int) -> AsyncGenerator[int, None]:
        self.prompts.append(len(prompt))
        self.num_running += 1
        try:
            if len(prompt) == 100 and self.prompts.count(100) % 2 == 0:
                raise UnavailableError("no worker", retry_after_s=None)
            for _ in range(2 if len(prompt) == 100 else max_tokens):
                await asyncio.sleep(0.001)
                yield 1
        finally:
            self.num_running -= 1


async def test_a_turn_mixes_long_prompts_with_streams_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bench.mixed.LEAD_S", 0.02)
    side = ScriptedSide()
    flags = argparse.Namespace(streams=3, prompts=2, prompt_tokens=100, interval=0.05)
    turn = await run_turn(side, random.Random(0), flags)
    assert side.prompts == [64, 64, 64, 100, 100]
    assert side.num_running == 0
    assert [one.failed for one in turn.longs] == [False, True]
    assert turn.ended_s - turn.began_s >= 0.12
    figures = turn.figures()
    assert figures["lost"] == 1
    assert figures["decode"]


async def test_vllms_side_streams_what_its_engine_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text(STAND_IN)
    (package / "sampling_params.py").write_text("class RequestOutputKind:\n    DELTA = 'delta'\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    async with vllm_side(
        python, tmp_path, cores=[0], memory_mb=1024, chunk_tokens=512, max_requests=4
    ) as side:
        endless = side.generate([1, 2], 10**9)
        assert await anext(endless) == 1
        counts = [count async for count in side.generate([1, 2, 3, 4], 5)]
        assert sum(counts) == 5
        await endless.aclose()
        assert [count async for count in side.generate([1, 2], 2)] == [1, 1]


async def test_a_python_without_vllm_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BatonError, match="ended with status 1"):
        async with vllm_side(
            Path(sys.executable),
            tmp_path,
            cores=[0],
            memory_mb=1024,
            chunk_tokens=512,
            max_requests=4,
        ):
            pass
