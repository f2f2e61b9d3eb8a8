"""Prompts that resume from host memory, from a cache server, and from several tiers at once: all with
the bits of a cold start, whatever becomes of a tier."""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.values import Completion
from pool.tiers import cache_server
from pool.tiers.block_tier import BlockTier
from pool.tiers.stage_blocks import BlockMove
from tests.one_process.test_disk_cache import (
    FIRST,
    LATER,
    PAGE,
    ROOT,
    SETTINGS,
    Layout,
    answers_of,
    ask,
    question,
)
from tests.router.harness import eventually
from tests.support.cache_servers import RunningServer, running_server
from tests.support.cluster.one_process import cluster_in_process
from tests.support.cluster.questions import shown
from tests.support.models.checkpoints import make_checkpoint

KEPT = 192  # tokens of the first prompt that a later one need not compute
OTHERS = tuple(question(f"other {at}", ROOT[at:] + ROOT[:at]) for at in range(10, 60, 10))
LAYOUTS: list[tuple[str, torch.dtype, Layout, Layout]] = [
    ("llama", torch.bfloat16, {"prefill_pp": 3}, {"prefill_pp": 2, "prefill_tp": 2}),
    ("qwen3_5_text", torch.bfloat16, {"prefill_pp": 2}, {"worker": {}, "worker_pp": 3}),
    ("gemma3", torch.bfloat16, {"worker": {}}, {"prefill_tp": 2}),
    ("deepseek_v3", torch.float32, {"prefill_tp": 2}, {"prefill_pp": 2}),
]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    with running_server(tmp_path) as running:
        yield running


def tiers_of(completion: Completion) -> dict[str, int]:
    """Return from which tiers the prompt's tokens were read."""
    usage = completion.finish.usage
    counts = {
        "host": usage.host_tokens,
        "disk": usage.disk_tokens,
        "server": usage.server_tokens,
        "worker": usage.pulled_tokens,
    }
    return {tier: count for tier, count in counts.items() if count}


@pytest.mark.parametrize(
    ("family", "dtype", "writer", "reader"),
    [
        pytest.param(*case, marks=pytest.mark.long if number >= 2 else ())
        for number, case in enumerate(LAYOUTS)
    ],
    ids=str,
)
async def test_pools_of_any_layout_share_a_server(
    family: str,
    dtype: torch.dtype,
    writer: Layout,
    reader: Layout,
    tmp_path: Path,
    server: RunningServer,
) -> None:
    model = make_checkpoint(tmp_path, family, dtype=dtype)
    expected = answers_of(model, (FIRST, *LATER))
    settings = SETTINGS | server.settings
    async with cluster_in_process(model, **settings, **writer) as client:
        completion = await ask(client, FIRST)
        assert (completion.finish.usage.cached_tokens, shown(completion)) == (0, expected[0])
    async with cluster_in_process(model, **settings, **reader) as client:
        for request, answer in zip(LATER, expected[1:], strict=True):
            completion = await ask(client, request)
            assert shown(completion) == answer
            # The first of them brought the blocks into memory.
            read = {"server": KEPT} if request.request_id == "again" else {}
            assert tiers_of(completion) == read


async def test_the_next_turn_reads_what_decode_generated(
    tmp_path: Path, server: RunningServer
) -> None:
    model = make_checkpoint(tmp_path, "llama", dtype=torch.bfloat16)
    turn = replace(FIRST, max_tokens=50)
    async with cluster_in_process(model, **SETTINGS, **server.settings) as client:
        tokens = (await ask(client, turn)).token_ids
        # The entry of the last token was never computed.
        known = (len(turn.prompt_token_ids) + len(tokens) - 1) // PAGE
        await server.until_stored(known)
        following = question("following", [*turn.prompt_token_ids, *tokens, *ROOT[7:30]])
        completion = await ask(client, following)
        assert completion.finish.usage.cached_tokens == known * PAGE
        assert [shown(completion)] == answers_of(model, (following,))


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
async def test_the_host_brings_back_what_the_pool_has_evicted(family: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, family, dtype=torch.bfloat16)
    expected = answers_of(model, (FIRST,))
    settings = SETTINGS | {"num_pages": 48, "max_running": 2, "host_cache_mb": 64}
    async with cluster_in_process(model, prefill_pp=2, **settings) as client:
        assert [shown(await ask(client, FIRST))] == expected
        for other in OTHERS:
            await ask(client, other)
        completion = await ask(client, FIRST)
        assert [shown(completion)] == expected
        assert tiers_of(completion) == {"host": KEPT}


async def test_what_a_far_tier_has_is_copied_to_the_nearer_ones(
    tmp_path: Path, server: RunningServer
) -> None:
    model = make_checkpoint(tmp_path, "llama", dtype=torch.bfloat16)
    expected = answers_of(model, (FIRST,))
    settings = SETTINGS | server.settings | {"host_cache_mb": 64}
    found = []
    for disk, asked in (("one", 2), ("one", 1), ("two", 1), ("two", 1)):
        async with cluster_in_process(model, disk_cache=tmp_path / disk, **settings) as client:
            for _ in range(asked):
                completion = await ask(client, FIRST)
                assert [shown(completion)] == expected
                found.append(tiers_of(completion))
                await client.flush_caches()
    assert found == [{}, {"host": KEPT}, {"disk": KEPT}, {"server": KEPT}, {"disk": KEPT}]


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
async def test_a_block_that_a_stage_lacks_is_computed_once(family: str, tmp_path: Path) -> None:
    """The leader knows its own part only, and would ask for the block in vain each time."""
    model = make_checkpoint(tmp_path, family, dtype=torch.bfloat16)
    expected = answers_of(model, (FIRST,))
    # Decode pools would write whole blocks.
    settings = SETTINGS | {"prefill": {"disk_cache": tmp_path / "disk"}, "prefill_pp": 2}
    async with cluster_in_process(model, **settings) as client:
        await ask(client, FIRST)
    later_stage = [
        path
        for path in (tmp_path / "disk").rglob("*.*of1")
        if not path.name.partition(".")[2].startswith("0-")
    ]
    assert later_stage
    for path in later_stage:
        if path.name.startswith("state" if family == "qwen3_5_text" else "page"):
            path.unlink()
    found = []
    async with cluster_in_process(model, **settings) as client:
        for _ in range(3):
            completion = await ask(client, FIRST)
            assert [shown(completion)] == expected
            found.append(tiers_of(completion))
            await asyncio.sleep(0.5)  # until it is written
            await client.flush_caches()
    assert found == [{}, {"disk": KEPT}, {"disk": KEPT}]


async def test_damaged_objects_change_no_answer(tmp_path: Path, server: RunningServer) -> None:
    model = make_checkpoint(tmp_path, "qwen3_5_text", dtype=torch.bfloat16)
    expected = answers_of(model, (FIRST,))
    settings = SETTINGS | server.settings
    async with cluster_in_process(model, **settings) as client:
        await ask(client, FIRST)
    dice = random.Random(8)
    with server.client() as names:
        for name in list(names.scan_iter("baton:*")):
            for label, content in names.hgetall(name).items():
                damaged = bytearray(content)
                damaged[dice.randrange(len(damaged))] ^= 1 << dice.randrange(8)
                names.hset(name, label, bytes(damaged))
    for read in ({}, {"server": KEPT}):  # the damaged objects were replaced
        async with cluster_in_process(model, **settings) as client:
            completion = await ask(client, FIRST)
            assert [shown(completion)] == expected
            assert tiers_of(completion) == read


async def test_a_pool_with_another_key_has_its_own_objects(
    tmp_path: Path, server: RunningServer
) -> None:
    model = make_checkpoint(tmp_path, "llama", dtype=torch.bfloat16)
    other = tmp_path / "other key"
    other.write_bytes(bytes(32))
    settings = SETTINGS | server.settings
    for key, cached in ((server.key_file, 0), (other, 0), (server.key_file, KEPT), (other, KEPT)):
        async with cluster_in_process(model, **settings | {"cache_server_key": key}) as client:
            completion = await ask(client, FIRST)
            assert completion.finish.usage.server_tokens == cached


@pytest.mark.parametrize("event", ["killed", "frozen", "restarted"])
async def test_a_server_that_fails_costs_only_its_copies(
    event: str, tmp_path: Path, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_server, "SILENT_S", 0.3)
    monkeypatch.setattr(cache_server, "AVOID_S", 0.5)
    model = make_checkpoint(tmp_path, "llama", dtype=torch.bfloat16)
    expected = answers_of(model, (FIRST, *LATER))
    settings = SETTINGS | server.settings
    async with cluster_in_process(model, **settings) as client:
        await ask(client, FIRST)
        await server.until_stored(KEPT // PAGE)
        await client.flush_caches()
        if event == "frozen":
            server.freeze()
        else:
            server.kill()
        if event == "restarted":
            server.start()
        try:
            for request, answer in zip((FIRST, *LATER), expected, strict=True):
                completion = await ask(client, request)
                assert shown(completion) == answer
                assert tiers_of(completion) == {}
        finally:
            server.thaw()
        if event != "killed":
            await asyncio.sleep(1)  # it is asked again
            await client.flush_caches()
            assert shown(await ask(client, FIRST)) == expected[0]


async def until_written(written: list[int], count: int) -> None:
    """Wait until so many blocks were written, the sum of all writes."""
    await eventually(lambda: sum(written) >= count, "a copy")


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
async def test_a_prompt_goes_to_the_data_rank_whose_host_memory_has_it(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompts are asked one after the other while both ranks are idle: by load alone each would
    miss its copy half of the time. Each rank has pages for one prompt and a bit."""
    written, moved = list[int](), BlockTier.moved

    def noted(self: BlockTier, move: BlockMove, num_moved: int) -> None:
        written.append(0 if move.load else num_moved)
        moved(self, move, num_moved)

    monkeypatch.setattr(BlockTier, "moved", noted)
    model = make_checkpoint(tmp_path, family, dtype=torch.bfloat16)
    prompts = tuple(question(f"{at}", ROOT[at : at + 200]) for at in range(0, 90, 10))
    expected = answers_of(model, prompts)
    prefill = {"dp_attention": 2, "num_pages": 24, "host_cache_mb": 64}
    async with cluster_in_process(
        model, prefill_pp=2, prefill_tp=2, prefill=prefill, **SETTINGS
    ) as client:
        for kept in (0, KEPT, KEPT):
            num_read = 0
            for number, (prompt, answer) in enumerate(zip(prompts, expected, strict=True)):
                completion = await ask(client, prompt)
                assert shown(completion) == answer
                usage = completion.finish.usage
                assert usage.cached_tokens == kept
                num_read += usage.host_tokens > 0
                if not kept:  # else the next prompt may evict what is not written yet
                    await until_written(written, (number + 1) * KEPT // PAGE)
            assert num_read >= len(prompts) - 2 if kept else num_read == 0
