"""Prompts that resume from the disk: after a restart, in another role or layout, and from files that
are damaged, all with the bits of a cold start."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.client import AsyncBatonClient
from baton.values import Completion
from engine.core.request import Request, SamplingParams
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
LAYOUTS: list[tuple[str, torch.dtype, Layout, Layout]] = [
    ("llama", torch.bfloat16, {}, {}),
    ("llama", torch.bfloat16, {"prefill_pp": 3}, {"prefill_pp": 2, "prefill_tp": 2}),
    ("llama", torch.float32, {"prefill_tp": 2}, {"worker": {}, "worker_pp": 2}),
    ("qwen3_moe", torch.bfloat16, {"worker": {}}, {"prefill_tp": 2}),
    ("deepseek_v3", torch.float32, {"prefill_tp": 2}, {"prefill_pp": 2}),
    ("glm_moe_dsa_short", torch.bfloat16, {"prefill_pp": 2}, {}),
    ("qwen3_5_text", torch.bfloat16, {"prefill_pp": 3}, {"prefill_pp": 2, "prefill_tp": 2}),
    ("kimi_linear", torch.bfloat16, {}, {"worker": {}, "worker_pp": 2}),
    ("gemma3", torch.bfloat16, {"prefill_pp": 2}, {"prefill_pp": 3}),
]


async def ask(client: AsyncBatonClient, request: Request) -> Completion:
    return await client.complete(as_query(request), timeout_s=60)


def answers_of(model: Path, requests: tuple[Request, ...]) -> list[Shown]:
    return on_the_wire(Reference(model).answers(list(requests)))


@pytest.mark.parametrize(("family", "dtype", "writer", "reader"), LAYOUTS, ids=str)
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
