"""Every family's tiny checkpoint served end to end: prefill in two stages, decode in three."""

import asyncio
from pathlib import Path

import pytest
import torch

from engine.core.numerics import WeightFormat
from tests.support.cluster.one_process import cluster_in_process
from tests.support.cluster.questions import as_query, make_questions, on_the_wire, shown
from tests.support.cluster.reference import Reference
from tests.support.models.checkpoints import FAMILY_NAMES, make_checkpoint
from tests.support.models.quantized import meant_by, write_quantized

QUESTIONS = make_questions(4, seed=31, max_prompt=150, max_tokens=12)


@pytest.mark.parametrize("family", FAMILY_NAMES)
async def test_served_like_one_process(
    tmp_path_factory: pytest.TempPathFactory, family: str
) -> None:
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("families"), family)
    expected = on_the_wire(Reference(checkpoint).answers(QUESTIONS))
    async with cluster_in_process(checkpoint, prefill_pp=2, decode_pp=3) as client:
        completions = await asyncio.gather(
            *(client.complete(as_query(question), timeout_s=60) for question in QUESTIONS)
        )
        assert [shown(completion) for completion in completions] == expected


@pytest.mark.parametrize(
    ("layout", "family"), [("fp8 blocks", "deepseek_v32"), ("gptq reordered", "qwen3_5_text")]
)
async def test_a_quantized_model_is_served_like_its_dequantized_one(
    tmp_path: Path, layout: str, family: str
) -> None:
    checkpoint = write_quantized(make_checkpoint(tmp_path, family), tmp_path / "model", layout)
    expected = on_the_wire(Reference(meant_by(checkpoint)).answers(QUESTIONS))
    async with cluster_in_process(checkpoint, prefill_pp=2, decode_pp=3) as client:
        completions = await asyncio.gather(
            *(client.complete(as_query(question), timeout_s=60) for question in QUESTIONS)
        )
        assert [shown(completion) for completion in completions] == expected


@pytest.mark.parametrize(
    ("family", "prefill", "weights"),
    [
        ("qwen3_5_moe_text", (2, 1), "int8"),
        ("llama4", (1, 2), "int4"),
        pytest.param("llama4", (1, 2), "int8", marks=pytest.mark.long),
        pytest.param("qwen3_5_moe_text", (2, 1), "int4", marks=pytest.mark.long),
        pytest.param("deepseek_v32", (2, 2), "int4", marks=pytest.mark.long),
    ],
)
async def test_coded_weights_are_served_like_in_one_process(
    tmp_path: Path, family: str, prefill: tuple[int, int], weights: str
) -> None:
    """By prefill's (stages, ranks of each); asked twice, and the second time found in the
    caches."""
    checkpoint = make_checkpoint(tmp_path, family, dtype=torch.bfloat16)
    expected = on_the_wire(
        Reference(checkpoint, weight_format=WeightFormat(weights)).answers(QUESTIONS)
    )
    async with cluster_in_process(
        checkpoint,
        prefill_pp=prefill[0],
        prefill_tp=prefill[1],
        decode_pp=3,
        decode_tp=2,
        weights=weights,
    ) as client:
        for _ in range(2):
            completions = await asyncio.gather(
                *(client.complete(as_query(question), timeout_s=60) for question in QUESTIONS)
            )
            assert [shown(completion) for completion in completions] == expected
        assert any(completion.finish.usage.cached_tokens for completion in completions)
        assert expected != on_the_wire(Reference(checkpoint).answers(QUESTIONS))
