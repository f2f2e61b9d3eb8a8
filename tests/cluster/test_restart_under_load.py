"""One pool of each role, four requests a second: each worker is killed, and no request is
refused."""

import asyncio
from dataclasses import replace
from pathlib import Path

from baton.client import AsyncBatonClient
from baton.retry import NO_RETRY
from tests.support.cluster.clusters import RunningCluster, running_cluster
from tests.support.cluster.questions import as_query, make_questions, on_the_wire, shown
from tests.support.cluster.reference import Reference


def num_formed(running: RunningCluster) -> int:
    """Count how often a pool began to serve, by its leader's log; a polled status may miss a short
    loss."""
    return sum("serving with" in line for line in running.lines)


async def test_a_worker_that_restarts_costs_no_request(
    checkpoint: Path, reference: Reference
) -> None:
    """Neither those that it held nor those that arrive before it is back. Nothing is tried again by
    the client."""
    questions = make_questions(8, seed=41, max_prompt=100, max_tokens=60)
    expected = on_the_wire(reference.answers(questions))
    over = asyncio.Event()
    async with (
        running_cluster(checkpoint, decode_pp=2) as running,
        AsyncBatonClient(running.cluster.address, retry=NO_RETRY) as client,
    ):
        answers: list[asyncio.Task[bool]] = []

        async def asked(index: int) -> bool:
            which = index % len(questions)
            query = replace(as_query(questions[which]), request_id=f"r{index}")
            return shown(await client.complete(query, timeout_s=60)) == expected[which]

        async def steadily() -> None:
            while not over.is_set():
                answers.append(asyncio.create_task(asked(len(answers))))
                await asyncio.sleep(0.25)

        load = asyncio.create_task(steadily())
        for victim in ("prefill-0", "decode-0.0", "decode-0.1"):
            await asyncio.sleep(0.5)
            before = num_formed(running)
            running.cluster.processes[victim].kill()
            async with asyncio.timeout(60):
                while num_formed(running) == before:  # noqa: ASYNC110 (a log has no event)
                    await asyncio.sleep(0.02)
            await running.until(
                lambda status: all(worker.serving for worker in status.workers), "all serve again"
            )
        over.set()
        await load
        assert all(await asyncio.gather(*answers))
        await running.until_clean()
