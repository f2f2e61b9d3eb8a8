"""Background requests pause for urgent ones on a full pool of two stages, and keep their bits."""

import asyncio
from dataclasses import replace
from pathlib import Path

from engine.core.request import Request
from tests.support.cluster.clusters import RunningCluster, running_cluster, samples_of
from tests.support.cluster.questions import Shown, as_query, make_questions, on_the_wire, shown
from tests.support.cluster.reference import Reference

PLACES = 3
ROUNDS = 5  # on a fast machine the background requests of a round may end too soon
QUESTIONS = make_questions(40, seed=41, max_prompt=150, max_tokens=300)


async def asked(running: RunningCluster, question: Request, name: str, priority: int) -> Shown:
    query = replace(as_query(question), request_id=name, priority=priority)
    return shown(await running.client.complete(query, timeout_s=60))


async def preemptions(running: RunningCluster) -> float:
    port = await running.metrics_port("router")
    samples = await asyncio.to_thread(samples_of, port, "baton_migrations_total")
    assert not samples.get(("failed", "preempted"))
    return samples.get(("resumed", "preempted"), 0.0)


async def test_preempted_requests_keep_their_bits(checkpoint: Path, reference: Reference) -> None:
    background = [question for question in QUESTIONS if question.max_tokens > 200][:PLACES]
    urgent = [question for question in QUESTIONS if question.max_tokens < 30][:2]
    expected = on_the_wire(reference.answers([*background, *urgent]))
    flags = ("--max-running", str(PLACES - 1), "--max-landing", "1")
    async with running_cluster(checkpoint, decode_pp=2, worker_flags=flags) as running:
        for number in range(ROUNDS):
            batch = [
                asyncio.create_task(asked(running, question, f"batch {number} {i}", 1))
                for i, question in enumerate(background)
            ]
            await running.until(
                lambda status: sum(worker.running_requests for worker in status.workers) >= PLACES,
                "a full pool",
            )
            answers = await asyncio.gather(
                *(asked(running, one, f"now {number} {i}", 0) for i, one in enumerate(urgent))
            )
            assert [*await asyncio.gather(*batch), *answers] == expected
            if await preemptions(running):
                break
        assert await preemptions(running)
        await running.until_clean()
