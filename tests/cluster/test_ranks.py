"""Ranks that share stages are killed one after the other, and their pools serve on."""

import asyncio
from pathlib import Path

import pytest

from baton.values import Completion
from runtime.errors import BatonError
from tests.cluster.test_death import STATUS_WITHIN_S, timed
from tests.cluster.test_rolling import LOST, address_of, busy, migrations
from tests.support.cluster.clusters import running_cluster
from tests.support.cluster.questions import make_questions, on_the_wire, shown
from tests.support.cluster.reference import Reference


@pytest.mark.long
@pytest.mark.parametrize(
    ("pools", "data_ranks", "victims"),
    [
        (1, 1, ("prefill-0.1", "decode-0.1", "decode-0.2", "decode-0.0")),
        (2, 2, ("prefill-0.1", "decode-0.1", "decode-0.3", "decode-0.0")),
    ],
    ids=["one pool", "one of two pools of data ranks"],
)
async def test_a_killed_rank_is_survived(
    checkpoint: Path, reference: Reference, pools: int, data_ranks: int, victims: tuple[str, ...]
) -> None:
    """Several ranks in turn, under load: bounded errors, none where there is another pool, and
    service again with the same bits and processes."""
    questions = make_questions(4 * pools, seed=11, max_prompt=250, max_tokens=60 * pools)
    right = on_the_wire(reference.answers(questions))
    async with running_cluster(
        checkpoint,
        prefill=pools,
        decode=pools,
        prefill_tp=2,
        decode_pp=2,
        decode_tp=2,
        prefill_dp_attention=data_ranks,
        decode_dp_attention=data_ranks,
    ) as running:
        processes = running.cluster.processes
        for victim in victims:
            pids = {name: process.pid for name, process in processes.items() if name != victim}
            under_way = [asyncio.create_task(timed(running, question)) for question in questions]
            await asyncio.sleep(0.3)
            if pools > 1 and victim.startswith("decode"):
                # A slow machine may not have reserved anything yet; one that ends is enough, too.
                watch = asyncio.create_task(busy(running, address_of(running, "decode-0.0")))
                await asyncio.wait([watch, *under_way], return_when=asyncio.FIRST_COMPLETED)
                watch.cancel()
            killed_s = asyncio.get_running_loop().time()
            processes[victim].kill()
            for (result, ended_s), answer in zip(
                await asyncio.gather(*under_way), right, strict=True
            ):
                if isinstance(result, BatonError) and pools == 1:
                    assert ended_s - killed_s < STATUS_WITHIN_S, f"{victim}: {result}"
                else:
                    assert isinstance(result, Completion), f"{victim}: {result}"
                    assert shown(result) == answer
            await running.cluster.wait_serving(timeout_s=60)
            await running.until_clean(timeout_s=60)
            again = await asyncio.gather(*(timed(running, question) for question in questions))
            assert [
                shown(result) if isinstance(result, Completion) else result for result, _ in again
            ] == right
            assert {name: processes[name].pid for name in pids} == pids, (
                f"{victim}: no survivor was restarted"
            )
        assert pools == 1 or (await migrations(running))[LOST], "requests went on at the other pool"
