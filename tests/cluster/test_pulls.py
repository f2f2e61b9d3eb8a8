"""Conversations whose turns are served by any workers; and prefill workers that die or freeze while
others pull cached prompts from them."""

import asyncio
import os
import random
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.values import Completion
from engine.core.request import Request, SamplingParams
from tests.support.cluster.clusters import RunningCluster, running_cluster, samples_of
from tests.support.cluster.questions import Shown, as_query, on_the_wire, shown
from tests.support.cluster.reference import Reference
from tests.support.models.checkpoints import make_checkpoint

PAGE = 16
ROOT = random.Random(12).choices(range(3, 256), k=600)
NUM_PROMPTS = 12
ROUTER = ("--policy", "round_robin", "--pull-tokens", "1", "--watch-interval-s", "0.05")


def prompts() -> list[Request]:
    """Return prompts that begin alike and differ at the end."""
    return [
        Request(
            f"{number}",
            (*ROOT[:400], *ROOT[number : number + 40]),
            8,
            SamplingParams(temperature=0.0),
            num_top_logprobs=0,
        )
        for number in range(NUM_PROMPTS)
    ]


async def ask(running: RunningCluster, questions: list[Request], salt: str) -> list[Completion]:
    return list(
        await asyncio.gather(
            *(
                running.client.complete(replace(as_query(each), cache_salt=salt), timeout_s=90)
                for each in questions
            )
        )
    )


def all_shown(answers: list[Completion]) -> list[Shown]:
    return [shown(answer) for answer in answers]


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_a_holder_that_is_lost_costs_no_answer(
    how: signal.Signals, checkpoint: Path, reference: Reference
) -> None:
    questions = prompts()
    expected = on_the_wire(reference.answers(questions))
    flags = ("--page-size", str(PAGE))
    async with running_cluster(
        checkpoint, prefill=2, prefill_pp=2, worker_flags=flags, router_flags=ROUTER
    ) as running:
        processes = running.cluster.processes
        for turn, victim in enumerate(("prefill-0.0", "prefill-1.1", "prefill-0.1")):
            salt = str(turn)  # so that each turn begins with nothing cached
            first = await ask(running, questions[:1], salt)
            assert all_shown(first) == expected[:1]
            await asyncio.sleep(0.3)  # the router hears of it
            answers = asyncio.create_task(ask(running, questions, salt))
            await asyncio.sleep(0.02 * turn)
            pid = processes[victim].pid
            assert pid is not None
            os.kill(pid, how)
            try:
                assert all_shown(await answers) == expected
            finally:
                if how is signal.SIGSTOP:
                    os.kill(pid, signal.SIGCONT)
            await running.cluster.wait_serving(timeout_s=60)
            await running.until_clean(timeout_s=90)
        assert all_shown(await ask(running, questions, "last")) == expected
        await running.until_clean(timeout_s=60)


async def num_slower(running: RunningCluster) -> float:
    """Return how many blocks prefill workers have computed because that seemed faster than pulls."""
    count = 0.0
    for name in ("prefill-0", "prefill-1"):
        port = await running.metrics_port(name)
        samples = await asyncio.to_thread(samples_of, port, "baton_pull_blocks_total")
        count += sum(value for labels, value in samples.items() if "slower" in labels)
    return count


@pytest.mark.long
@pytest.mark.parametrize("policy", ["prefix_cache", "round_robin"])
async def test_a_turn_computes_what_is_new_whichever_workers_serve_it(
    policy: str, tmp_path: Path
) -> None:
    """Eight turns of four conversations: each prompt is the one before it, its answer and some new
    tokens. At most a page of what was there before is computed again, unless a busy machine makes
    pulls so slow that computing is faster."""
    model = make_checkpoint(tmp_path, "llama", dtype=torch.bfloat16)
    reference = Reference(model)
    new_tokens, answer_tokens = 24, 16
    flags = (*ROUTER[2:], "--policy", policy)
    async with running_cluster(
        model,
        prefill=2,
        decode=2,
        worker_flags=("--page-size", str(PAGE)),
        router_flags=flags,
    ) as running:
        histories = [ROOT[number * 100 : number * 100 + 100] for number in range(4)]
        num_checked = 0
        for turn in range(8):
            questions = [
                Request(
                    f"{turn}-{number}",
                    tuple(history),
                    answer_tokens,
                    SamplingParams(temperature=0.0),
                    num_top_logprobs=0,
                )
                for number, history in enumerate(histories)
            ]
            before = await num_slower(running)
            answers = await ask(running, questions, "")
            has_pulled = await num_slower(running) == before
            assert all_shown(answers) == on_the_wire(reference.answers(questions))
            for number, answer in enumerate(answers):
                usage = answer.finish.usage
                if turn and has_pulled:
                    # Of the last token of an answer there is no entry.
                    num_new = new_tokens + 1 + PAGE
                    assert usage.prompt_tokens - usage.cached_tokens <= num_new
                    num_checked += 1
                begin = 7 * turn + number
                histories[number] += [*answer.token_ids, *ROOT[begin : begin + new_tokens]]
            await asyncio.sleep(1.0)  # the router hears of it
        assert num_checked
        await running.until_clean()
