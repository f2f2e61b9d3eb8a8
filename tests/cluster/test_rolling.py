"""Every worker is restarted, one is killed, and clients notice nothing: no error, no gap, no other
bit."""

import asyncio
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from baton.load import Outcome
from baton.load_run import run_load
from baton.workload import Arrivals, Lengths, Shape, make_queries, plan
from engine.core.request import Request
from runtime.errors import BatonError
from tests.support.cluster.clusters import RunningCluster, running_cluster
from tests.support.cluster.questions import as_query, make_questions, on_the_wire, shown
from tests.support.cluster.reference import Reference

DRAIN_S = 0.2  # shorter than a question takes, so that decode pools hand some back
# A prefill worker and a part of a decode pool at a time: a stage alone, a leader alone, a whole
# pool.
STEPS = (("prefill-0", "decode-0.1"), ("prefill-1", "decode-0.0"), ("decode-1.0", "decode-1.1"))
RESTART_S = 120.0
LOST, DRAINED = '{outcome="resumed",type="lost"}', '{outcome="resumed",type="drained"}'
WITNESSES = 3  # long responses in progress at any time


async def steady_load(running: RunningCluster, over: asyncio.Event) -> list[Outcome]:
    """Run `baton load` until told to stop."""
    info, shape = (
        await running.client.model_info(),
        Shape(Lengths("constant", 40), Lengths("constant", 30)),
    )
    outcomes: list[Outcome] = []
    while not over.is_set():
        planned = plan(8, Arrivals(rate=4), shape, seed=len(outcomes))
        queries = make_queries(info, planned, seed=len(outcomes))
        outcomes += await run_load(running.client, queries, [item.at_s for item in planned])
    return outcomes


async def long_answers(
    running: RunningCluster, questions: list[Request], over: asyncio.Event
) -> list[tuple[int, object]]:
    """Return (question, response or error) of sequential requests that outlast every drain."""
    answers: list[tuple[int, object]] = []
    while not over.is_set():
        index = len(answers) % len(questions)
        try:
            answers.append(
                (
                    index,
                    shown(await running.client.complete(as_query(questions[index]), timeout_s=60)),
                )
            )
        except BatonError as error:
            answers.append((index, error))
    return answers


async def migrations(running: RunningCluster) -> dict[str, float]:
    """Return the migrations of the router's /metrics, by type and outcome."""
    url = f"http://127.0.0.1:{await running.metrics_port('router')}/metrics"
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=60).read().decode())
    lines = [
        line.split(" ") for line in text.splitlines() if line.startswith("baton_migrations_total{")
    ]
    return {labels.removeprefix("baton_migrations_total"): float(value) for labels, value in lines}


async def busy(running: RunningCluster, address: str) -> None:
    """Wait until the decode pool at this address runs requests."""
    await running.until(
        lambda status: any(
            worker.address == address and worker.running_requests > 1 for worker in status.workers
        ),
        "requests on the pool that is to stop",
    )


def address_of(running: RunningCluster, name: str) -> str:
    """Return the address of a process, which restarts keep."""
    announcement = running.cluster.processes[name].announcement
    assert announcement is not None
    return announcement.address


async def drain_at_work(running: RunningCluster, leader: str, *others: str) -> None:
    """Restart a pool until its drain has handed a request back; on a fast machine requests may
    finish in time."""
    for _ in range(5):
        if (await migrations(running)).get(DRAINED):
            return
        await busy(running, address_of(running, leader))
        await running.cluster.restart(leader, *others, timeout_s=RESTART_S)
    assert (await migrations(running)).get(DRAINED), "no drain met a request in mid-stream"


async def kill_at_work(running: RunningCluster, name: str) -> None:
    """Kill a pool's leader until it dies with a request in mid-stream.

    The router's view of its work is delayed, and the work may finish before the signal arrives.
    """
    for _ in range(5):
        await busy(running, address_of(running, name))
        running.cluster.processes[name].kill()
        with suppress(TimeoutError):
            async with asyncio.timeout(20):
                while not (await migrations(running)).get(LOST):  # noqa: ASYNC110 (another process counts)
                    await asyncio.sleep(0.1)
                return
        await running.cluster.wait_serving(timeout_s=RESTART_S)
    raise AssertionError("no kill met a request in mid-stream")


@pytest.mark.timeout(600)
@pytest.mark.long
async def test_a_rolling_restart_and_a_kill_under_load_cost_no_request(
    checkpoint: Path, reference: Reference
) -> None:
    questions = [
        question
        for question in make_questions(12, seed=21, max_prompt=200, max_tokens=300)
        if question.max_tokens > 150
    ]
    expected = on_the_wire(reference.answers(questions))
    async with running_cluster(
        checkpoint, prefill=2, decode=2, decode_pp=2, worker_flags=("--drain-s", str(DRAIN_S))
    ) as running:
        over = asyncio.Event()
        load = asyncio.create_task(steady_load(running, over))
        witnesses = [
            asyncio.create_task(long_answers(running, questions[i::WITNESSES], over))
            for i in range(WITNESSES)
        ]
        pids = {name: process.pid for name, process in running.cluster.processes.items()}
        for step in STEPS:
            await running.cluster.restart(*step, timeout_s=RESTART_S)
        assert "of the pool died" not in running.log_tail(2000), (
            "a stage left without its leader's goodbye"
        )
        restarted = {
            name for name, process in running.cluster.processes.items() if process.pid != pids[name]
        }
        assert restarted == {name for step in STEPS for name in step}
        await drain_at_work(running, "decode-1.0", "decode-1.1")
        await kill_at_work(running, "decode-0.0")
        over.set()
        outcomes = await load
        assert [outcome.error for outcome in outcomes if outcome.error is not None] == []
        assert len(outcomes) > 8, "asked again and again while processes restarted"
        for i, witness in enumerate(witnesses):
            for index, answer in await witness:
                assert answer == expected[i::WITNESSES][index]
        moved = await migrations(running)
        assert moved.pop(DRAINED, 0) > 0
        assert moved.pop(LOST, 0) > 0
        assert not any(moved.values()), f"a move failed: {moved}"
