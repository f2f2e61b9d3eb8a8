"""Whole clusters on one device: workers of both roles, drafts, cached prompts and captured steps,
against the host's tokens."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.client import AsyncBatonClient
from baton.values import Completion, Query, Sampling, Stop
from bench.adapters import write_random_adapter
from tests.support.cluster.one_process import cluster_in_process
from tests.support.models.published import QWEN3_0_6B, write_published

DEMO = Path(__file__).parents[2] / "demo"
GREEDY = Sampling(temperature=0.0)
QUERIES = [
    Query(prompt=text, sampling=GREEDY, stop=Stop(max_tokens=16))
    for text in ("3 5 7 9", "10 20 30 40", "4 3 2 " * 30)
]
DEVICE: Mapping[str, Any] = {"device": "cuda", "numerics": "fast", "memory_mb": 512}
# Outputs and inputs of projections of the demo model.
FEED_FORWARD = {"mlp.gate_proj": (384, 128), "mlp.up_proj": (384, 128), "mlp.down_proj": (128, 384)}
CLOSE = 0.1  # logprobs of two tokens, either of which bf16 may sample

pytestmark = pytest.mark.usefixtures("whole_roles", "device")


async def complete(client: AsyncBatonClient, queries: list[Query]) -> list[Completion]:
    return await asyncio.gather(*(client.complete(query, timeout_s=120) for query in queries))


async def tokens_of(client: AsyncBatonClient) -> list[tuple[int, ...]]:
    return [each.token_ids for each in await complete(client, QUERIES)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"worker": {}},
        {"worker": {"draft": "suffix"}},
        {"worker": {"draft": DEMO / "draft"}},
        {"draft": DEMO / "draft", "decode_pp": 2, "spec_topk": 4, "spec_draft_tokens": 8},
    ],
    ids=["one role", "both roles", "suffixes", "both roles with a draft", "stages with trees"],
)
async def test_the_demo_model_gives_the_hosts_tokens(settings: dict[str, Any]) -> None:
    """Twice, the second time after cached prompts."""
    async with cluster_in_process(DEMO / "model") as client:
        expected = await tokens_of(client)
    async with cluster_in_process(DEMO / "model", **DEVICE, **settings) as client:
        assert await tokens_of(client) == expected
        assert await tokens_of(client) == expected


async def test_adapters_give_the_hosts_tokens(tmp_path: Path) -> None:
    """Rows with different adapters and with none in one batch."""
    model = DEMO / "model"
    for seed, name in enumerate(("one", "two")):
        write_random_adapter(
            tmp_path / name, rank=8, seed=seed, num_layers=8, projections=FEED_FORWARD
        )
    queries = [
        replace(query, model=name) for query in QUERIES for name in ("", ":one", ":two", ":one")
    ]
    answers = []
    for settings in ({}, DEVICE):
        async with cluster_in_process(model, adapters=tmp_path, **settings) as client:
            answers.append([each.token_ids for each in await complete(client, queries)])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("settings", [{}, {"worker": {}}, {"worker": {"draft": "suffix"}}])
async def test_captured_steps_serve_what_eager_steps_serve(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """A published shape in bf16; answers may part where two tokens are as likely."""
    model = write_published(tmp_path / "model", "Qwen3Config", QWEN3_0_6B, has_weights=True)
    queries = [
        Query(
            prompt=tuple(5 + (7 + key) * place % 700 for place in range(length)),
            sampling=GREEDY,
            stop=Stop(max_tokens=24),
            num_top_logprobs=2,
            skip_text=True,
        )
        for key, length in enumerate((40, 3, 130, 600))
    ]
    answers = []
    for cuda_graphs in (False, True):
        async with cluster_in_process(
            model, **DEVICE, **settings, max_running=4, cuda_graphs=cuda_graphs
        ) as client:
            answers.append(await complete(client, queries))
    for eager, captured in zip(*answers, strict=True):
        assert len(captured.token_ids) == 24
        pairs = zip(eager.token_ids, captured.token_ids, strict=True)
        parted = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
        if parted is not None:
            (_, best), (_, second) = eager.logprobs[parted].top
            assert best - second < CLOSE
