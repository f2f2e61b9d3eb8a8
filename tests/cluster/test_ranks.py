"""Pools whose stages are shared by ranks: the bits of one process, whatever the widths on both sides of a handoff."""

import asyncio
from pathlib import Path

import pytest

from baton.values import Completion
from runtime.errors import BatonError
from tests.cluster.conftest import Reference
from tests.cluster.test_death import STATUS_WITHIN_S, timed
from tests.cluster.test_equality import Shown, on_the_wire
from tests.support.cluster.clusters import running_cluster
from tests.support.cluster.one_process import cluster_in_process
from tests.support.cluster.questions import as_query, make_questions, shown
from tests.support.drafts.eagle import save_draft


@pytest.fixture(scope="module")
def expected(reference: Reference) -> list[Shown]:
    return on_the_wire(reference.answers(make_questions(6)))


@pytest.mark.parametrize(("prefill", "decode"), [((1, 2), (1, 1)), ((1, 1), (1, 2)), ((1, 2), (2, 2))],
                         ids=str)
async def test_every_width_gives_the_same_bits(checkpoint: Path, expected: list[Shown], prefill: tuple[int, int],
                                               decode: tuple[int, int]) -> None:
    """By (stages, ranks of each); the model has recurrent and attention layers."""
    async with cluster_in_process(checkpoint, prefill_pp=prefill[0], prefill_tp=prefill[1], decode_pp=decode[0],
                                  decode_tp=decode[1], chunk_tokens=64) as client:
        completions = await asyncio.gather(*(client.complete(as_query(question), timeout_s=60)
                                             for question in make_questions(6)))
        assert [shown(completion) for completion in completions] == expected
        workers = {worker.role: worker for worker in (await client.cluster_status()).workers}
        assert (workers["prefill"].tensor_size, workers["decode"].tensor_size) == (prefill[1], decode[1])


async def test_a_draft_reads_and_speculates_where_tokens_are_drawn(checkpoint: Path, expected: list[Shown],
                                                                   tmp_path: Path) -> None:
    """Its state of the prompt is handed over between the first ranks of the last stages."""
    draft = save_draft(tmp_path / "eagle3", layers=(0, 1, 3))
    async with cluster_in_process(checkpoint, prefill_tp=2, decode_pp=2, decode_tp=2,
                                  draft=draft, spec_topk=4, spec_steps=3, spec_draft_tokens=8) as client:
        completions = await asyncio.gather(*(client.complete(as_query(question), timeout_s=60)
                                             for question in make_questions(6)))
        assert [shown(completion) for completion in completions] == expected


@pytest.mark.long
async def test_a_killed_rank_is_survived(checkpoint: Path, reference: Reference) -> None:
    """Several ranks in turn, under load: bounded errors, and service again with the same bits and processes."""
    questions = make_questions(4, seed=11, max_prompt=250, max_tokens=60)
    right = on_the_wire(reference.answers(questions))
    async with running_cluster(checkpoint, prefill_tp=2, decode_pp=2, decode_tp=2) as running:
        processes = running.cluster.processes
        for victim in ("prefill-0.1", "decode-0.1", "decode-0.2", "decode-0.0"):
            pids = {name: process.pid for name, process in processes.items() if name != victim}
            under_way = [asyncio.create_task(timed(running, question)) for question in questions]
            await asyncio.sleep(0.3)
            killed_s = asyncio.get_running_loop().time()
            processes[victim].kill()
            for (result, ended_s), answer in zip(await asyncio.gather(*under_way), right, strict=True):
                if isinstance(result, BatonError):
                    assert ended_s - killed_s < STATUS_WITHIN_S, f"{victim}: {result}"
                else:
                    assert shown(result) == answer
            await running.cluster.wait_serving(timeout_s=60)
            await running.until_clean(timeout_s=60)
            again = await asyncio.gather(*(timed(running, question) for question in questions))
            assert [shown(result) if isinstance(result, Completion) else result for result, _ in again] == right
            assert {name: processes[name].pid for name in pids} == pids, f"{victim}: no survivor was restarted"
