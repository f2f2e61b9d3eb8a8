"""Requests with different adapters at once: every layout gives each the bits of one process, from a
cold cache and from a warm one, and no adapter gets another's cache."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.client import AsyncBatonClient
from engine.core.numerics import WeightFormat
from runtime.errors import UnknownModelError
from tests.support.cluster.one_process import cluster_in_process
from tests.support.cluster.questions import Shown, as_query, make_questions, on_the_wire, shown
from tests.support.cluster.reference import Reference
from tests.support.drafts.eagle import save_draft
from tests.support.models.adapters import write_adapter
from tests.support.models.checkpoints import make_checkpoint

NAMES = ("first", "", "second", "third", "first", "", "second")
QUESTIONS = [
    replace(question, adapter=name)
    for question, name in zip(
        make_questions(len(NAMES), seed=44, max_prompt=200, max_tokens=12), NAMES, strict=True
    )
]
EAGLE = {"spec_topk": 1, "spec_steps": 3, "spec_draft_tokens": 3, "spec_adaptive": False}
TREES = {**EAGLE, "spec_topk": 3, "spec_draft_tokens": 9}
DRAFT = {"draft": "eagle"}
DATA_RANKS = {role: {"dp_attention": 2} for role in ("prefill", "decode")}


def write_adapters(folder: Path, model: Path) -> Path:
    for seed, (name, rank) in enumerate((("first", 8), ("second", 8), ("third", 5))):
        write_adapter(folder / name, model, seed=seed, rank=rank)
    return folder


async def ask(client: AsyncBatonClient) -> list[Shown]:
    answers = await asyncio.gather(
        *(client.complete(as_query(question), timeout_s=60) for question in QUESTIONS)
    )
    return [shown(answer) for answer in answers]


@pytest.mark.parametrize(
    ("family", "layout", "settings"),
    [
        ("llama", {}, {}),
        ("llama", {"prefill_pp": 2, "decode_pp": 3}, {"weights": "int8"}),
        ("llama", {"prefill_tp": 2, "decode_pp": 2}, {"draft": Path("suffix")}),
        ("llama", {"decode_tp": 2}, {"local_rest_tokens": 64}),
        ("qwen3_5_text", {"decode_pp": 2}, {**DRAFT, **TREES}),
        ("qwen3_5_text", {"worker_tp": 2}, {**DRAFT, **EAGLE}),
        ("qwen3_5_text", {"worker_pp": 2}, {}),
        ("gemma3", {"prefill_pp": 2, "decode_tp": 2}, {}),
        ("llama", {"prefill_tp": 2, "decode_tp": 2}, {"overlap_tokens": 2}),
        ("llama", {"prefill_tp": 2, "decode_tp": 2}, DATA_RANKS),
        ("glm4_moe", {"prefill_tp": 2, "decode_pp": 2, "decode_tp": 2}, DATA_RANKS),
        ("qwen3_5_text", {"decode_tp": 4}, {"decode": {"dp_attention": 2}, **DRAFT, **TREES}),
    ],
    ids=str,
)
async def test_every_layout_gives_the_bits_of_one_process(
    family: str, layout: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    model = make_checkpoint(tmp_path, family, dtype=torch.bfloat16)
    adapters = write_adapters(tmp_path / "adapters", model)
    reference = Reference(
        model, weight_format=WeightFormat(settings.get("weights", "model")), adapters=adapters
    )
    expected = on_the_wire(reference.answers(QUESTIONS))
    if settings.get("draft") == "eagle":
        settings = {**settings, "draft": save_draft(tmp_path / "eagle3", layers=(0, 1, 3))}
    worker: dict[str, object] | None = (
        {} if any(name.startswith("worker") for name in layout) else None
    )
    async with cluster_in_process(
        model, adapters=adapters, chunk_tokens=64, worker=worker, **layout, **settings
    ) as client:
        for _ in range(2):
            assert await ask(client) == expected


async def test_an_adapter_gets_no_cache_of_another(checkpoint: Path, tmp_path: Path) -> None:
    adapters = write_adapters(tmp_path / "adapters", checkpoint)
    question = replace(QUESTIONS[0], prompt_token_ids=tuple(range(3, 203)))
    names = ("", "first", "second")
    asked = [replace(question, request_id=name, adapter=name) for name in names]
    expected = on_the_wire(Reference(checkpoint, adapters=adapters).answers(asked))
    assert len({str(answer) for answer in expected}) == len(names)
    async with cluster_in_process(checkpoint, adapters=adapters, page_size=16) as client:
        for is_warm in (False, True):
            for each, answer in zip(asked, expected, strict=True):
                completion = await client.complete(as_query(each), timeout_s=60)
                assert bool(completion.finish.usage.cached_tokens) is is_warm, each.adapter
                assert shown(completion) == answer


async def test_an_adapter_that_is_not_there_is_named(checkpoint: Path, tmp_path: Path) -> None:
    adapters = write_adapters(tmp_path / "adapters", checkpoint)
    async with cluster_in_process(
        checkpoint, adapters=adapters, router={"model_alias": ("other",)}
    ) as client:
        info = await client.model_info()
        assert info.adapters == ("first", "second", "third")
        for model in ("first", ":first", "other:first", f"{info.model}:first"):
            query = replace(as_query(QUESTIONS[1]), model=model)
            assert len((await client.complete(query, timeout_s=60)).token_ids)
        for model in (":fourth", f"{info.model}:", "unknown:first", "first:first"):
            query = replace(as_query(QUESTIONS[1]), model=model)
            with pytest.raises(UnknownModelError, match="adapters first, second, third"):
                await client.complete(query, timeout_s=60)
