"""Processes of their own give the bits of one; more topologies, in one process, are in
tests/one_process."""

import asyncio
from pathlib import Path

import pytest

from tests.support.cluster.clusters import running_cluster
from tests.support.cluster.questions import as_query, make_questions, on_the_wire, shown
from tests.support.cluster.reference import Reference
from tests.support.models.checkpoints import make_checkpoint

QUESTIONS = make_questions(8)


@pytest.mark.parametrize(
    ("partitions", "transport"), [(("3,1", "1,2,1"), "tcp"), (("", ""), "shm")]
)
async def test_processes_of_their_own_give_the_same_bits(
    checkpoint: Path, reference: Reference, partitions: tuple[str, str], transport: str
) -> None:
    expected = on_the_wire(reference.answers(QUESTIONS))
    async with running_cluster(
        checkpoint,
        prefill_pp=2,
        decode_pp=3,
        prefill_partition=partitions[0],
        decode_partition=partitions[1],
        worker_flags=("--transport", transport),
    ) as running:
        completions = await asyncio.gather(
            *(running.client.complete(as_query(question), timeout_s=60) for question in QUESTIONS)
        )
        assert [shown(completion) for completion in completions] == expected
        await running.until_clean()


async def test_selected_keys_cross_processes(tmp_path_factory: pytest.TempPathFactory) -> None:
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("families"), "glm_moe_dsa")
    expected = on_the_wire(Reference(checkpoint).answers(QUESTIONS))
    async with running_cluster(checkpoint, prefill_pp=2, decode_pp=3) as running:
        completions = await asyncio.gather(
            *(running.client.complete(as_query(question), timeout_s=60) for question in QUESTIONS)
        )
        assert [shown(completion) for completion in completions] == expected
        await running.until_clean()
