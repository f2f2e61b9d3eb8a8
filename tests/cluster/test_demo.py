"""`make demo` as a newcomer sees it, and the shipped model's recall through the whole cluster."""

import asyncio
import subprocess
import sys

import pytest

from baton.cluster_config import demo_model
from baton.values import Query, Sampling, Stop
from demo.corpus import recall_questions
from tests.support.cluster.clusters import running_cluster


def test_the_demo_gives_the_right_answer() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "baton", "demo"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "Near the library Ivan hid a red notebook.\n\nright:" in done.stdout
    assert "KV transfer time not overlapped with prefill" in done.stdout
    assert "├ 0-4 ┼ 4-8 ┤" in done.stdout, "decode has two stages"
    _, _, aggregated = done.stdout.partition("the same with one worker that prefills and decodes")
    assert "Near the library Ivan hid a red notebook.\n\nright:" in aggregated


@pytest.mark.long
async def test_recall_through_two_prefill_and_three_decode_stages() -> None:
    questions = recall_questions(60, seed=5, max_facts=6)
    async with running_cluster(demo_model(), prefill_pp=2, decode_pp=3) as running:
        completions = await asyncio.gather(
            *(
                running.client.complete(
                    Query(
                        question.prompt,
                        Sampling(temperature=0.0),
                        Stop(max_tokens=24, strings=("\n",)),
                    ),
                    timeout_s=200,
                )
                for question in questions
            )
        )
        right = sum(
            completion.text.strip() == question.answer.replace("<|end|>", "").strip()
            for completion, question in zip(completions, questions, strict=True)
        )
        assert right >= 57, f"{right} of 60"
        await running.until_clean()
