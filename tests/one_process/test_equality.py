"""The same output from every topology: clusters against one process, tokens and logprobs bit for
bit."""

import asyncio
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.values import TokenLogprobs
from engine.contracts.model import StageOutput
from engine.core.batch import ForwardBatch, ForwardMode, GraphBucket, ScoringRow
from engine.graphs.host_steps import HostSteps
from engine.sampling.sampler import score
from models.loader import read_model
from tests.support.cluster.one_process import cluster_in_process
from tests.support.cluster.questions import Shown, as_query, make_questions, on_the_wire, shown
from tests.support.cluster.reference import Reference
from tests.support.grids import mostly_long
from tests.support.models.checkpoints import oracle
from tests.support.models.single_stage import StageDriver


@pytest.fixture(scope="module")
def expected(reference: Reference) -> list[Shown]:
    return on_the_wire(reference.answers(make_questions(8)))


@pytest.fixture(scope="module")
def expected_scores(checkpoint: Path) -> tuple[TokenLogprobs, ...]:
    """Return the scores of the first prompt, computed in one process as one chunk."""
    driver, prompt = (
        StageDriver(read_model(checkpoint)),
        tuple(make_questions(1)[0].prompt_token_ids),
    )
    batch = driver.batch(ForwardMode.PREFILL, {0: list(prompt)}, samples=False)
    batch.scoring = (ScoringRow(prompt[1:], num_top=3),)
    (scores,) = score(driver.run(batch).logits, batch).scores
    return tuple(
        TokenLogprobs(
            float(np.float32(found.logprob)),
            tuple((token, float(np.float32(value))) for token, value in found.top),
        )
        for found in (token.logprobs for token in scores)
        if found is not None
    )


@torch.no_grad()
def test_scores_of_a_prompt_are_those_of_transformers(
    checkpoint: Path, expected_scores: tuple[TokenLogprobs, ...]
) -> None:
    prompt = torch.tensor([make_questions(1)[0].prompt_token_ids])
    theirs = oracle(checkpoint)(prompt).logits[0].double().log_softmax(-1)
    assert len(expected_scores) == prompt.shape[1] - 1 > 60
    for position, ours in enumerate(expected_scores, start=1):
        at = theirs[position - 1]
        assert ours.logprob == pytest.approx(float(at[prompt[0, position]]), abs=1e-4)
        assert [value for _, value in ours.top] == pytest.approx(
            at.topk(3).values.tolist(), abs=1e-4
        )


async def test_steps_that_are_prepared_ahead_give_the_same_bits(
    checkpoint: Path, expected: list[Shown]
) -> None:
    """A client cancels in mid-output. Leaving the cluster checks that all resources were
    released."""
    questions = make_questions(8)
    async with cluster_in_process(checkpoint, decode={"overlap_steps": True}) as client:
        async for _ in client.generate(
            as_query(replace(questions[0], request_id="left", max_tokens=64)), timeout_s=60
        ):
            break
        completions = await asyncio.gather(
            *(client.complete(as_query(question), timeout_s=60) for question in questions)
        )
        assert [shown(completion) for completion in completions] == expected


async def test_chunks_of_prompts_that_are_replayed_give_the_same_bits(
    checkpoint: Path, expected: list[Shown], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From any position, of two stages that hand over each layer as it completes."""
    run, replayed = HostSteps.run, Counter[ForwardMode]()

    def counting(
        steps: HostSteps, batch: ForwardBatch, bucket: GraphBucket, given: StageOutput
    ) -> StageOutput:
        before = steps.num_replays
        output = run(steps, batch, bucket, given)
        replayed[batch.mode] += steps.num_replays - before
        return output

    monkeypatch.setattr(HostSteps, "run", counting)
    async with cluster_in_process(checkpoint, prefill_pp=2, chunk_tokens=64) as client:
        for _ in range(2):
            for query, answer in zip(map(as_query, make_questions(8)), expected, strict=True):
                assert (
                    shown(await client.complete(replace(query, prefix_cache=False), timeout_s=60))
                    == answer
                )
    assert replayed[ForwardMode.PREFILL] > 20


@pytest.mark.parametrize(
    ("prefill_pp", "decode_pp"),
    mostly_long(product([1, 2, 3, 4], repeat=2), kept=[(1, 1), (2, 3), (3, 4), (4, 2)]),
)
async def test_every_split_gives_the_same_bits_s0_7_s4_9(
    checkpoint: Path,
    expected: list[Shown],
    expected_scores: tuple[TokenLogprobs, ...],
    prefill_pp: int,
    decode_pp: int,
) -> None:
    chunk = 64 if (prefill_pp + decode_pp) % 2 else 128
    async with cluster_in_process(
        checkpoint, prefill_pp=prefill_pp, decode_pp=decode_pp, chunk_tokens=chunk
    ) as client:
        queries = [as_query(question) for question in make_questions(8)]
        alone = [shown(await client.complete(query, timeout_s=60)) for query in queries[:2]]
        scored = await client.complete(
            replace(queries[0], num_prompt_logprobs=3, n=2), timeout_s=60
        )
        together = await asyncio.gather(
            *(client.complete(query, timeout_s=60) for query in queries)
        )
        assert alone == expected[:2]
        assert [shown(completion) for completion in together] == expected
        assert shown(scored) == expected[0]
        assert scored.prompt_logprobs == expected_scores
