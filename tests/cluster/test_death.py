"""Any one process dies by SIGKILL under load: bounded errors, clean survivors, service again
without their restart."""

import asyncio
import time
from pathlib import Path

import pytest

from baton.cluster_config import demo_model
from baton.values import Completion
from bench.rolling import come_back
from engine.core.request import Request
from runtime.errors import BatonError
from tests.support.cluster.clusters import RunningCluster, running_cluster
from tests.support.cluster.questions import Shown, as_query, make_questions, on_the_wire, shown
from tests.support.cluster.reference import Reference

STATUS_WITHIN_S = 30.0  # of the 60 that a client has


def long_questions(count: int) -> list[Request]:
    return make_questions(count, seed=11, max_prompt=250, max_tokens=200)


async def timed(
    running: RunningCluster, question: Request
) -> tuple[Completion | BatonError, float]:
    """Return the response or the error, and its time."""
    try:
        result: Completion | BatonError = await running.client.complete(
            as_query(question), timeout_s=60
        )
    except BatonError as error:
        result = error
    return result, time.monotonic()


async def survive(
    running: RunningCluster,
    victim: str,
    questions: list[Request],
    expected: list[Shown],
    *,
    after_s: float,
) -> None:
    """Kill a process under load and check that the cluster recovers.

    Each request gets its response or soon an error; later ones are served by the surviving
    processes and the restarted one.
    """
    processes = running.cluster.processes
    survivors = {name: process.pid for name, process in processes.items() if name != victim}
    under_way = [asyncio.create_task(timed(running, question)) for question in questions]
    await asyncio.sleep(after_s)
    killed_s = time.monotonic()
    processes[victim].kill()
    for (result, ended_s), right in zip(await asyncio.gather(*under_way), expected, strict=True):
        if isinstance(result, BatonError):
            assert ended_s - killed_s < STATUS_WITHIN_S, (
                f"{result} came {ended_s - killed_s:.1f} s after the kill"
            )
        else:
            assert shown(result) == right
    await running.cluster.wait_serving(timeout_s=60)
    await running.until_clean(timeout_s=60)
    again = await asyncio.gather(*(timed(running, question) for question in questions))
    assert [
        shown(result) if isinstance(result, Completion) else result for result, _ in again
    ] == expected
    await running.until_clean()
    assert {name: processes[name].pid for name in survivors} == survivors, (
        f"{victim}: no survivor was restarted"
    )


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0.0", "decode-0.1", "router"])
async def test_a_killed_process_is_survived(
    checkpoint: Path, reference: Reference, victim: str
) -> None:
    questions = long_questions(10)
    expected = on_the_wire(reference.answers(questions))
    async with running_cluster(checkpoint, decode_pp=2) as running:
        await survive(running, victim, questions, expected, after_s=0.7)


async def test_a_prefill_that_dies_before_the_first_token_is_replaced(
    checkpoint: Path, reference: Reference
) -> None:
    """With two prefill workers, killing one loses no request that had no token yet."""
    questions = make_questions(16, seed=12, max_prompt=480, max_tokens=8)
    expected = on_the_wire(reference.answers(questions))
    async with running_cluster(
        checkpoint, prefill=2, worker_flags=("--chunk-tokens", "64")
    ) as running:
        under_way = [asyncio.create_task(timed(running, question)) for question in questions]
        await asyncio.sleep(0.1)
        running.cluster.processes["prefill-0"].kill()
        results = [result for result, _ in await asyncio.gather(*under_way)]
        assert [
            shown(result) if isinstance(result, Completion) else result for result in results
        ] == expected
        await running.cluster.wait_serving(timeout_s=60)
        await running.until_clean(timeout_s=60)


@pytest.mark.long
async def test_a_killed_worker_of_the_demo_model_serves_again() -> None:
    """And how soon, to be read with `-s`: it is no more than three seconds on a machine that has
    cores to spare, which `python -m bench.rolling --kill` holds."""
    async with running_cluster(demo_model(), decode_pp=2) as running:
        for victim in ("prefill-0", "decode-0.0", "decode-0.1"):
            killed_s = time.monotonic()
            await come_back(running.cluster, running.client, victim)
            print(f"{victim}: away for {time.monotonic() - killed_s:.2f} s")
