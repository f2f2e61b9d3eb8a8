"""Prompts that resume from the cache of another pool, with the bits of a cold start."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.client import AsyncBatonClient
from baton.cluster_config import demo_model
from baton.values import Completion
from bench.acceptance import held_out_queries
from decode import worker
from decode.speculation import VerifiedStep
from engine.core.request import Request, SamplingParams
from pool.pulls.puller import Puller
from protos import types_pb2
from tests.support.cluster.leaders import flush
from tests.support.cluster.one_process import cluster_in_process
from tests.support.cluster.questions import Shown, as_query, on_the_wire, shown
from tests.support.cluster.reference import Reference
from tests.support.drafts.eagle import save_draft
from tests.support.models.checkpoints import make_checkpoint

PAGE = 16
ROOT = random.Random(6).choices(range(3, 256), k=400)
ROUTER = {"pull_tokens": 1, "watch_interval_s": 0.05}
HEARD_S = 0.5  # until the router has heard of the latest blocks, with much to spare
SETTINGS: dict[str, Any] = {"page_size": PAGE, "chunk_tokens": 64}


def question(name: str, prompt: list[int], *, num_tokens: int = 8) -> Request:
    params = SamplingParams(temperature=0.0)
    return Request(name, tuple(prompt), num_tokens, params, num_top_logprobs=0)


async def ask(client: AsyncBatonClient, request: Request) -> Completion:
    return await client.complete(as_query(request), timeout_s=60)


def answers_of(model: Path, *requests: Request) -> list[Shown]:
    return on_the_wire(Reference(model).answers(list(requests)))


# Family, layouts of prefill and decode (stages, ranks of each), what prefill has cached.
TURNS = [
    ("llama", torch.bfloat16, (1, 1), (1, 1), "prompt"),
    ("llama", torch.float32, (2, 2), (3, 1), "nothing"),
    ("qwen3_moe", torch.bfloat16, (1, 1), (2, 1), "nothing"),
    ("deepseek_v3", torch.bfloat16, (2, 1), (1, 2), "prompt"),
]


@pytest.mark.parametrize(("family", "dtype", "prefill", "decode", "kept"), TURNS, ids=str)
async def test_the_next_turn_takes_what_decode_generated(
    family: str,
    dtype: torch.dtype,
    prefill: tuple[int, int],
    decode: tuple[int, int],
    kept: str,
    tmp_path: Path,
) -> None:
    model = make_checkpoint(tmp_path, family, dtype=dtype)
    turn = question("first", ROOT[:200], num_tokens=50)
    async with cluster_in_process(
        model,
        prefill_pp=prefill[0],
        prefill_tp=prefill[1],
        decode_pp=decode[0],
        decode_tp=decode[1],
        router=ROUTER,
        announced=tmp_path,
        **SETTINGS,
    ) as client:
        tokens = (await ask(client, turn)).token_ids
        if kept == "nothing":
            await flush(tmp_path / "prefill-0.json")
        await asyncio.sleep(HEARD_S)
        following = question("following", [*ROOT[:200], *tokens, *ROOT[7:50]])
        completion = await ask(client, following)
        # The entry of the last token was never computed.
        known = (200 + len(tokens) - 1) // PAGE
        usage = completion.finish.usage
        held = 0 if kept == "nothing" else 200 // PAGE
        assert usage.cached_tokens == known * PAGE
        assert (usage.pulled_tokens, usage.disk_tokens) == ((known - held) * PAGE, 0)
        assert [shown(completion)] == answers_of(model, following)


# Family, layouts of the two prefill pools (stages, ranks of each).
PREFILL_POOLS = [
    ("qwen3_5_text", torch.bfloat16, (3, 1), (2, 2)),
    ("kimi_linear", torch.bfloat16, (1, 1), (2, 1)),
    ("gemma3", torch.float32, (1, 2), (1, 1)),
]


@pytest.mark.parametrize(("family", "dtype", "first", "second"), PREFILL_POOLS, ids=str)
async def test_a_prefill_worker_takes_what_another_computed(
    family: str, dtype: torch.dtype, first: tuple[int, int], second: tuple[int, int], tmp_path: Path
) -> None:
    """Models with recurrent states resume at the last state that the other one kept."""
    model = make_checkpoint(tmp_path, family, dtype=dtype)
    prompt, longer = question("first", ROOT[:200]), question("longer", ROOT[:300])
    async with cluster_in_process(
        model,
        prefill_pp=first[0],
        prefill_tp=first[1],
        other_prefill=second,
        router=ROUTER | {"policy": "round_robin"},
        **SETTINGS,
    ) as client:
        assert (await ask(client, prompt)).finish.usage.cached_tokens == 0
        await asyncio.sleep(HEARD_S)
        completion = await ask(client, longer)
        usage = completion.finish.usage
        assert (usage.cached_tokens, usage.pulled_tokens, usage.disk_tokens) == (192, 192, 0)
        assert [shown(completion)] == answers_of(model, longer)


DATA_RANKS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"prefill_pp": 2, "prefill_tp": 2, "prefill": {"dp_attention": 2}, "decode_tp": 2}),
    ("deepseek_v3", {"prefill_tp": 2, "prefill": {"dp_attention": 2}, "decode_pp": 2}),
    ("qwen3_moe", {"worker": {"dp_attention": 2}, "worker_tp": 2, "num_workers": 2}),
]


@pytest.mark.parametrize(("family", "layout"), DATA_RANKS, ids=str)
async def test_every_data_rank_takes_what_others_have(
    family: str, layout: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several prompts at a time, so that all data ranks get some."""
    pulling, bring = set[int](), Puller.bring

    async def noted(
        self: Puller, request: Request, names: tuple[bytes, ...], holder: types_pb2.BlockHolder
    ) -> int:
        pulling.add(self.data_rank)
        return await bring(self, request, names, holder)

    monkeypatch.setattr(Puller, "bring", noted)
    model = make_checkpoint(tmp_path, family, dtype=torch.bfloat16)
    firsts = [question(f"{at}", ROOT[at : at + 120], num_tokens=20) for at in range(0, 200, 50)]
    is_aggregated = "worker" in layout
    policy: dict[str, object] = {"policy": "round_robin"} if is_aggregated else {}
    async with cluster_in_process(
        model, router=ROUTER | policy, announced=tmp_path, **layout, **SETTINGS
    ) as client:
        turns = await asyncio.gather(*(ask(client, first) for first in firsts))
        if not is_aggregated:
            await flush(tmp_path / "prefill-0.json")
        await asyncio.sleep(HEARD_S)
        later = [
            question(f"{first.request_id} goes on", [*first.prompt_token_ids, *turn.token_ids, 7])
            for first, turn in zip(firsts, turns, strict=True)
        ]
        seconds = await asyncio.gather(*(ask(client, each) for each in later))
        assert [shown(second) for second in seconds] == answers_of(model, *later)
        usages = [second.finish.usage for second in seconds]
        known = (120 + 20 - 1) // PAGE * PAGE
        assert [usage.cached_tokens for usage in usages] == [known] * len(later)
        pulled = [usage.pulled_tokens for usage in usages]
        assert all(pulled) if not is_aggregated else any(pulled)
    assert pulling == {0, 1} or is_aggregated


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
async def test_a_worker_of_both_roles_takes_what_another_has(family: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, family, dtype=torch.bfloat16)
    prompt, longer = question("first", ROOT[:200]), question("longer", ROOT[:300])
    async with cluster_in_process(
        model,
        worker={},
        num_workers=2,
        worker_pp=2,
        router=ROUTER | {"policy": "round_robin"},
        **SETTINGS,
    ) as client:
        for request, known in ((prompt, 0), (longer, 192)):
            completion = await ask(client, request)
            assert completion.finish.usage.cached_tokens == known
            assert [shown(completion)] == answers_of(model, request)
            await asyncio.sleep(HEARD_S)


@pytest.mark.parametrize("holder", ["decode", "prefill"])
async def test_the_entries_of_a_draft_come_along(
    holder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many drafts are accepted as after a cold start. Decode pools of the demo's model do not
    lend, because it has recurrent states."""
    seen: list[VerifiedStep] = []
    monkeypatch.setattr(worker, "observe_verified", lambda metrics, step: seen.append(step))
    if holder == "prefill":
        model, draft = demo_model(), demo_model().parent / "draft"
        text = " ".join(str(query.prompt) for query in held_out_queries(3))
        query = replace(held_out_queries(1)[0], prompt=text)
    else:
        model = make_checkpoint(tmp_path, "llama", dtype=torch.float32)
        draft = save_draft(tmp_path / "eagle3", layers=(0, 1, 3))
        query = as_query(question("first", ROOT[:200], num_tokens=60))
    drafting = {
        "draft": draft,
        "spec_topk": 4,
        "spec_draft_tokens": 8,
        "spec_adaptive": False,
        "spec_suffix": False,
    }
    async with cluster_in_process(
        model,
        other_prefill=None if holder == "decode" else (2, 1),
        prefill=drafting,
        decode=drafting,
        router=ROUTER | {"policy": "round_robin"},
        announced=tmp_path,
        **SETTINGS,
    ) as client:
        seen.clear()  # without the warm-up
        cold = await client.complete(query, timeout_s=60)
        cold_steps = [(step.num_drafted, step.accepted) for step in seen]
        seen.clear()
        if holder == "decode":
            await flush(tmp_path / "prefill-0.json")
        await asyncio.sleep(HEARD_S)
        pulled = await client.complete(replace(query, request_id="pulled"), timeout_s=60)
    assert cold.finish.usage.cached_tokens == 0
    assert pulled.finish.usage.cached_tokens >= PAGE
    assert pulled.token_ids == cold.token_ids
    assert [(step.num_drafted, step.accepted) for step in seen] == cold_steps
    assert any(sum(accepted) for _, accepted in cold_steps)


async def test_salts_keep_prompts_apart(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "llama", dtype=torch.bfloat16)
    async with cluster_in_process(model, router=ROUTER, announced=tmp_path, **SETTINGS) as client:
        for salt, known in (("one", 0), ("two", 0), ("one", 192)):
            await flush(tmp_path / "prefill-0.json")
            await asyncio.sleep(HEARD_S)
            query = replace(as_query(question(salt, ROOT[:200])), cache_salt=salt)
            completion = await client.complete(query, timeout_s=60)
            assert completion.finish.usage.cached_tokens == known
