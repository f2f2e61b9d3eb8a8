"""gpt-oss with experts in MXFP4, as published, served by processes."""

import asyncio
from pathlib import Path

import pytest
import torch

from tests.models.test_mxfp4 import quantized
from tests.support.cluster.clusters import running_cluster
from tests.support.cluster.questions import as_query, make_questions, on_the_wire, shown
from tests.support.cluster.reference import Reference
from tests.support.models.checkpoints import make_checkpoint


@pytest.mark.long
async def test_stages_drafts_and_caches_give_the_bits_of_one_process(tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path, "gpt_oss_blocks", dtype=torch.bfloat16)
    model, _ = quantized(plain, tmp_path)
    questions = make_questions(8)
    expected = on_the_wire(Reference(model).answers(questions))
    async with running_cluster(
        model,
        prefill=2,
        prefill_pp=2,
        decode_pp=3,
        worker_flags=("--draft", "suffix", "--spec-draft-tokens", "8", "--no-spec-adaptive"),
    ) as running:
        for _ in range(2):
            found = await asyncio.gather(
                *(running.client.complete(as_query(each), timeout_s=60) for each in questions)
            )
            assert [shown(each) for each in found] == expected
        await running.until_clean()
