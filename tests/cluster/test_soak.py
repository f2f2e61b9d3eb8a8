"""Many requests, many of them cancelled: the others are right, and nothing leaks."""

import asyncio
import random
from pathlib import Path

import pytest

from tests.support.cluster.clusters import RunningCluster, open_descriptors, running_cluster
from tests.support.cluster.questions import as_query, make_questions, on_the_wire, shown
from tests.support.cluster.reference import Reference

NUM_REQUESTS, NUM_DISTINCT, SHARE_CANCELLED, CONCURRENCY = 500, 50, 0.2, 24


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_500_requests_a_fifth_cancelled(
    checkpoint: Path, reference: Reference, num_ranks: int
) -> None:
    """On two stages, of which the ranks are data ranks; their prompts come from ranks that share
    all requests."""
    distinct = make_questions(NUM_DISTINCT, seed=3, max_prompt=300, max_tokens=20)
    expected = on_the_wire(reference.answers(distinct))
    rng, gate = random.Random(5), asyncio.Semaphore(CONCURRENCY)
    async with running_cluster(
        checkpoint,
        decode_pp=2,
        prefill_tp=num_ranks,
        decode_tp=num_ranks,
        decode_dp_attention=num_ranks,
    ) as running:
        await flood(running, distinct[:10])
        before = {
            name: (size, descriptors(running, name))
            for name, size in running.resident_bytes().items()
        }

        async def one(i: int) -> bool | None:
            """Return True for a correct response, False for a wrong one, None if cancelled."""
            pick = i % NUM_DISTINCT
            query = as_query(
                distinct[pick].__class__(**{**distinct[pick].__dict__, "request_id": f"soak-{i}"})
            )
            async with gate:
                task = asyncio.create_task(running.client.complete(query, timeout_s=60))
                if rng.random() < SHARE_CANCELLED:
                    await asyncio.sleep(rng.random() * 0.3)
                    task.cancel()
                    await asyncio.wait([task])
                    return None
                return shown(await task) == expected[pick]

        outcomes = await asyncio.gather(*(one(i) for i in range(NUM_REQUESTS)))
        await running.until_clean()
        after = {
            name: (size, descriptors(running, name))
            for name, size in running.resident_bytes().items()
        }
    assert outcomes.count(False) == 0
    assert outcomes.count(None) > NUM_REQUESTS * SHARE_CANCELLED / 2
    for name, (size, files) in after.items():
        assert size - before[name][0] < 40 << 20, (
            f"{name} grew from {before[name][0]} to {size} bytes"
        )
        assert files - before[name][1] < 20, (
            f"{name} went from {before[name][1]} to {files} open files"
        )


async def flood(running: RunningCluster, questions: list) -> None:  # type: ignore[type-arg]
    """Use every path once, so that later growth is a leak and not a cache."""
    for _ in range(3):
        await asyncio.gather(
            *(running.client.complete(as_query(question), timeout_s=60) for question in questions)
        )


def descriptors(running: RunningCluster, name: str) -> int:
    pid = running.cluster.processes[name].pid
    assert pid is not None
    return open_descriptors(pid)
