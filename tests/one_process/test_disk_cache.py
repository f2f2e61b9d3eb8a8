"""Prompts that resume from the disk: after a restart, in another role or layout, and from files that
are damaged, all with the bits of a cold start."""

import asyncio
import errno
import os
import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.client import AsyncBatonClient
from baton.values import Completion
from engine.core.request import Request, SamplingParams
from pool.pipeline.group import StageGroup
from pool.tiers import block_tier, folder
from pool.tiers.folder import FilePath, read_file
from pool.tiers.stage_blocks import BlockMove, StageBlocks
from tests.support.cluster.one_process import cluster_in_process
from tests.support.cluster.questions import Shown, as_query, on_the_wire, shown
from tests.support.cluster.reference import Reference
from tests.support.models.checkpoints import make_checkpoint

PAGE, CHUNK = 16, 64
ROOT = random.Random(6).choices(range(3, 256), k=330)
SETTINGS: dict[str, Any] = {"page_size": PAGE, "chunk_tokens": CHUNK}


def question(name: str, prompt: list[int], *, is_sampled: bool = False) -> Request:
    params = (
        SamplingParams(temperature=0.9, top_k=50, seed=7)
        if is_sampled
        else SamplingParams(temperature=0.0)
    )
    return Request(name, tuple(prompt), 8, params, num_top_logprobs=0)


FIRST = question("first", ROOT[:200])
# The same, a longer one, and one that parts from it.
LATER = (
    question("again", ROOT[:200]),
    question("longer", ROOT[:300], is_sampled=True),
    question("parted", [*ROOT[:160], *ROOT[5:80]]),
)
# Writer, reader.
Layout = dict[str, Any]
DATA_RANKS: Layout = {"prefill_tp": 2, "prefill": {"dp_attention": 2}}
LAYOUTS: list[tuple[str, torch.dtype, Layout, Layout]] = [
    ("llama", torch.bfloat16, {}, {}),
    ("llama", torch.bfloat16, {"prefill_pp": 3}, {"prefill_pp": 2, "prefill_tp": 2}),
    ("llama", torch.float32, {"prefill_tp": 2}, {"worker": {}, "worker_pp": 2}),
    ("qwen3_moe", torch.bfloat16, {"worker": {}}, {}),
    ("deepseek_v3", torch.float32, {"prefill_tp": 2}, {"prefill_pp": 2}),
    ("qwen3_5_text", torch.bfloat16, {"prefill_pp": 3}, {"prefill_pp": 2, "prefill_tp": 2}),
    ("kimi_linear", torch.bfloat16, {}, {"worker": {}, "worker_pp": 2}),
    ("deepseek_v3", torch.bfloat16, {"prefill_pp": 2} | DATA_RANKS, {}),
    ("llama", torch.bfloat16, {}, DATA_RANKS),
    ("qwen3_5_text", torch.bfloat16, {"prefill_tp": 2}, {"prefill_pp": 2} | DATA_RANKS),
    ("gemma3", torch.bfloat16, {"prefill_pp": 2}, {"prefill_pp": 3}),
]


async def ask(client: AsyncBatonClient, request: Request) -> Completion:
    return await client.complete(as_query(request), timeout_s=60)


def answers_of(model: Path, requests: tuple[Request, ...]) -> list[Shown]:
    return on_the_wire(Reference(model).answers(list(requests)))


@pytest.mark.parametrize(
    ("family", "dtype", "writer", "reader"),
    [
        pytest.param(*case, marks=pytest.mark.long if number % 2 else ())
        for number, case in enumerate(LAYOUTS)
    ],
    ids=str,
)
async def test_a_prompt_resumes_after_a_restart_in_any_layout(
    family: str, dtype: torch.dtype, writer: Layout, reader: Layout, tmp_path: Path
) -> None:
    model = make_checkpoint(tmp_path, family, dtype=dtype)
    expected = answers_of(model, (FIRST, *LATER))
    settings = SETTINGS | {"disk_cache": tmp_path / "disk"}
    async with cluster_in_process(model, **settings, **writer) as client:
        completion = await ask(client, FIRST)
        assert completion.finish.usage.cached_tokens == 0
        assert shown(completion) == expected[0]
    async with cluster_in_process(model, **settings, **reader) as client:
        for request, answer in zip(LATER, expected[1:], strict=True):
            completion = await ask(client, request)
            assert shown(completion) == answer
            if request.request_id != "parted":
                assert completion.finish.usage.cached_tokens == 192
            # The first prompt brought them into memory.
            read = 192 if request.request_id == "again" else 0
            usage = completion.finish.usage
            assert (usage.pulled_tokens, usage.disk_tokens) == (0, read)


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name[0] != "."]


async def until_written(folder: Path, num_files: int) -> None:
    """Wait until the disk cache has so many files."""
    async with asyncio.timeout(30):
        while len(await asyncio.to_thread(files_in, folder)) < num_files:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
async def test_the_next_turn_resumes_after_what_decode_generated(
    family: str, tmp_path: Path
) -> None:
    model = make_checkpoint(tmp_path, family, dtype=torch.bfloat16)
    turn = replace(FIRST, max_tokens=50)
    async with cluster_in_process(model, disk_cache=tmp_path / "disk", **SETTINGS) as client:
        completion = await ask(client, turn)
        tokens = completion.token_ids
        assert len(tokens) == 50
        prompt = [*turn.prompt_token_ids, *tokens, *ROOT[7:30]]
        # The entry of the last token was never computed.
        known = (len(turn.prompt_token_ids) + len(tokens) - 1) // PAGE
        await until_written(tmp_path / "disk", known)
        following = question("following", prompt)
        completion = await ask(client, following)
        assert completion.finish.usage.cached_tokens == known * PAGE
        assert [shown(completion)] == answers_of(model, (following,))


async def test_salts_do_not_share_what_is_on_disk(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "llama", dtype=torch.bfloat16)
    for salt, known in (("one", 0), ("two", 0), ("one", 192)):
        async with cluster_in_process(model, disk_cache=tmp_path / "disk", **SETTINGS) as client:
            query = replace(as_query(FIRST), cache_salt=salt)
            completion = await client.complete(query, timeout_s=60)
            assert completion.finish.usage.cached_tokens == known


async def test_damaged_files_change_no_answer(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "qwen3_5_text", dtype=torch.bfloat16)
    expected = answers_of(model, (FIRST,))
    settings = SETTINGS | {"disk_cache": tmp_path / "disk"}
    async with cluster_in_process(model, **settings) as client:
        await ask(client, FIRST)
    dice = random.Random(8)
    for path in files_in(tmp_path / "disk"):
        data = bytearray(path.read_bytes())
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        path.write_bytes(data)
    async with cluster_in_process(model, **settings) as client:
        completion = await ask(client, FIRST)
        assert completion.finish.usage.cached_tokens == 0
        assert [shown(completion)] == expected
    async with cluster_in_process(model, **settings) as client:
        completion = await ask(client, FIRST)  # the damaged files were replaced
        assert completion.finish.usage.cached_tokens == 192
        assert [shown(completion)] == expected


async def test_a_full_disk_costs_only_the_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(folder, "write_file", refuse)
    model = make_checkpoint(tmp_path, "llama", dtype=torch.bfloat16)
    expected = answers_of(model, (FIRST, *LATER))
    async with cluster_in_process(model, disk_cache=tmp_path / "disk", **SETTINGS) as client:
        for request, answer in zip((FIRST, *LATER), expected, strict=True):
            assert shown(await ask(client, request)) == answer


async def test_a_frozen_disk_delays_requests_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_checkpoint(tmp_path, "llama", dtype=torch.bfloat16)
    expected = answers_of(model, (FIRST, *LATER))
    settings = SETTINGS | {"disk_cache": tmp_path / "disk"}
    async with cluster_in_process(model, **settings) as client:
        await ask(client, FIRST)
    thawed = threading.Event()

    def read_late(path: FilePath, pieces: Sequence[memoryview]) -> int:
        thawed.wait(60)
        return read_file(path, pieces)

    monkeypatch.setattr(folder, "read_file", read_late)
    monkeypatch.setattr(block_tier, "READ_LIMIT_S", 0.5)
    async with cluster_in_process(model, **settings) as client:
        for request, answer in zip((FIRST, *LATER), expected, strict=True):
            completion = await ask(client, request)
            assert shown(completion) == answer
            if request is FIRST:
                assert completion.finish.usage.cached_tokens == 0
        thawed.set()


@pytest.mark.parametrize(
    "layout",
    [
        {"prefill_tp": 2, "prefill": {"dp_attention": 2}},
        {"prefill_pp": 2, "prefill_tp": 4, "prefill": {"dp_attention": 2}},
        pytest.param({"worker": {"dp_attention": 2}, "worker_tp": 2}, marks=pytest.mark.long),
    ],
    ids=str,
)
async def test_every_data_rank_writes_and_reads(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several prompts at a time, so that all data ranks get some, which other ranks may read."""
    model = make_checkpoint(tmp_path, "llama", dtype=torch.bfloat16)
    requests = tuple(question(f"{at}", ROOT[at : at + 200]) for at in range(0, 120, 20))
    expected, moved, move = (
        answers_of(model, requests),
        set[tuple[int, bool]](),
        StageGroup.move_blocks,
    )

    async def noted(self: StageGroup, own: StageBlocks, data_rank: int, blocks: BlockMove) -> int:
        moved.add((data_rank, blocks.load))
        return await move(self, own, data_rank, blocks)

    monkeypatch.setattr(StageGroup, "move_blocks", noted)
    for known in (0, 192):
        async with cluster_in_process(model, disk_cache=tmp_path, **layout, **SETTINGS) as client:
            completions = await asyncio.gather(*(ask(client, request) for request in requests))
        assert [shown(each) for each in completions] == expected
        assert [each.finish.usage.disk_tokens for each in completions] == [known] * len(requests)
    assert moved == {(data_rank, load) for data_rank in (0, 1) for load in (False, True)}
