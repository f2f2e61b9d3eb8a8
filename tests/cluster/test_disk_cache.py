"""Processes die by SIGKILL while prompts are read from the disk and written there."""

import asyncio
import random
from pathlib import Path

import pytest

from baton.values import Completion
from engine.core.request import Request, SamplingParams
from tests.support.cluster.clusters import RunningCluster, running_cluster, samples_of
from tests.support.cluster.questions import as_query, on_the_wire, shown
from tests.support.cluster.reference import Reference

PAGE = 16
NUM_PROMPTS = 12
LENGTH = 280  # tokens of a prompt; states are kept after multiples of 64
KEPT = 256


def prompts() -> list[Request]:
    dice = random.Random(12)
    return [
        Request(
            f"{number}",
            tuple(dice.choices(range(3, 256), k=LENGTH)),
            8,
            SamplingParams(temperature=0.0),
            num_top_logprobs=0,
        )
        for number in range(NUM_PROMPTS)
    ]


async def ask(running: RunningCluster, questions: list[Request]) -> list[Completion]:
    return list(
        await asyncio.gather(
            *(running.client.complete(as_query(each), timeout_s=60) for each in questions)
        )
    )


@pytest.mark.long
async def test_a_killed_stage_costs_no_token_and_no_answer(
    checkpoint: Path, reference: Reference, tmp_path: Path
) -> None:
    questions = prompts()
    expected = on_the_wire(reference.answers(questions))
    flags = ("--disk-cache", str(tmp_path), "--page-size", str(PAGE))
    async with running_cluster(checkpoint, prefill_pp=2, worker_flags=flags) as running:
        processes = running.cluster.processes
        for victim in ("prefill-0.1", "prefill-0.0", "prefill-0.1"):
            # Killed while it writes, or reads what was written before.
            answers = asyncio.create_task(ask(running, questions))
            await asyncio.sleep(0.15)
            processes[victim].kill()
            assert [shown(answer) for answer in await answers] == expected
            await running.cluster.wait_serving(timeout_s=60)
            await running.until_clean(timeout_s=60)
        assert [shown(answer) for answer in await ask(running, questions)] == expected
        await running.until_clean()
        processes["prefill-0.0"].kill()
        await asyncio.sleep(0.5)
        await running.cluster.wait_serving(timeout_s=60)
        # Not all at once: more than MAX_READS of them would be computed in part.
        answered = [answer for each in questions for answer in await ask(running, [each])]
        assert [shown(answer) for answer in answered] == expected
        assert [answer.finish.usage.cached_tokens for answer in answered] == [KEPT] * NUM_PROMPTS
        assert [answer.finish.usage.disk_tokens for answer in answered] == [KEPT] * NUM_PROMPTS
        tokens = await asyncio.to_thread(
            samples_of, await running.metrics_port("router"), "baton_router_tier_tokens_total"
        )
        assert tokens["disk",] >= KEPT * NUM_PROMPTS
        assert tokens["worker",] == 0
