"""A whole cluster that drafts with the target's own NextN layer, all weights in eight bits: the
same output as one process without a draft."""

import asyncio
from pathlib import Path

import pytest
import torch

from engine.core.numerics import WeightFormat
from tests.support.cluster.clusters import running_cluster
from tests.support.cluster.questions import as_query, make_questions, on_the_wire, shown
from tests.support.cluster.reference import Reference
from tests.support.models.checkpoints import add_nextn, make_checkpoint

QUESTIONS = make_questions(4, seed=17, max_prompt=150, max_tokens=16)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write GLM-5 with layers that share their selection on both sides of the cut, and a draft
    whose steps share theirs."""
    folder = tmp_path_factory.mktemp("nextn")
    return add_nextn(
        make_checkpoint(folder, "glm_moe_dsa_pattern", dtype=torch.bfloat16),
        folder / "model",
        index_share_for_mtp_iteration=True,
    )


async def test_a_nextn_draft_changes_nothing(checkpoint: Path) -> None:
    flags = (
        "--draft",
        str(checkpoint),
        "--spec-steps",
        "3",
        "--spec-draft-tokens",
        "3",
        "--no-spec-adaptive",
        "--weights",
        "int8",
    )
    expected = on_the_wire(
        Reference(checkpoint, weight_format=WeightFormat.INT8).answers(QUESTIONS)
    )
    async with running_cluster(
        checkpoint, prefill_pp=2, decode_pp=2, worker_flags=flags
    ) as running:
        completions = await asyncio.gather(
            *(running.client.complete(as_query(question), timeout_s=60) for question in QUESTIONS)
        )
        assert [shown(completion) for completion in completions] == expected
        await running.until_clean()
