"""One pool of both roles gives the bits of one process: every family, over stages and ranks, and
with drafts; from a cold cache and from a warm one."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from baton.client import AsyncBatonClient
from tests.support.cluster.one_process import cluster_in_process
from tests.support.cluster.questions import Shown, as_query, make_questions, on_the_wire, shown
from tests.support.cluster.reference import Reference
from tests.support.drafts.eagle import save_draft
from tests.support.grids import mostly_long
from tests.support.models.checkpoints import FAMILY_NAMES, make_checkpoint

QUESTIONS = make_questions(5, seed=31, max_prompt=200, max_tokens=12)
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]  # stages, ranks of each
CASES = [(family, LAYOUTS[place % len(LAYOUTS)]) for place, family in enumerate(FAMILY_NAMES)]


async def assert_answers(client: AsyncBatonClient, expected: Sequence[Shown]) -> None:
    """Check the answers to all questions at once, twice, and to one that scores its prompt."""
    for _ in range(2):
        answers = await asyncio.gather(
            *(client.complete(as_query(question), timeout_s=60) for question in QUESTIONS)
        )
        assert [shown(answer) for answer in answers] == expected
    assert any(answer.finish.usage.cached_tokens for answer in answers)
    scored = replace(as_query(QUESTIONS[1]), num_prompt_logprobs=0)
    answer = await client.complete(scored, timeout_s=60)
    assert shown(answer) == expected[1]
    assert len(answer.prompt_logprobs) == len(QUESTIONS[1].prompt_token_ids) - 1


@pytest.mark.parametrize(
    ("family", "layout"),
    mostly_long(CASES, kept=CASES[:4]),
    ids=str,
)
async def test_every_family_gives_the_same_bits(
    tmp_path: Path, family: str, layout: tuple[int, int]
) -> None:
    checkpoint = make_checkpoint(tmp_path, family)
    expected = on_the_wire(Reference(checkpoint).answers(QUESTIONS))
    async with cluster_in_process(
        checkpoint, worker={}, worker_pp=layout[0], worker_tp=layout[1], chunk_tokens=64
    ) as client:
        await assert_answers(client, expected)


@pytest.mark.parametrize(
    ("layout", "width", "hands_over"),
    [
        ((1, 1), 1, True),
        ((2, 1), 3, True),
        ((1, 2), 3, False),
        ((2, 2), 1, False),
        ((2, 2), 3, True),
    ],
    ids=str,
)
async def test_a_draft_changes_no_bit(
    checkpoint: Path,
    reference: Reference,
    tmp_path: Path,
    layout: tuple[int, int],
    width: int,
    hands_over: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """Chains and trees; with the draft's state of the prompt in the pages, and without."""
    expected = on_the_wire(reference.answers(QUESTIONS))
    drafting = {
        "draft": save_draft(tmp_path / "eagle3", layers=(0, 1, 3)),
        "spec_topk": width,
        "spec_steps": 3,
        "spec_draft_tokens": 3 * width,
        "spec_prompt": hands_over,
        "spec_adaptive": False,
    }
    async with cluster_in_process(
        checkpoint, worker=drafting, worker_pp=layout[0], worker_tp=layout[1], chunk_tokens=64
    ) as client:
        await assert_answers(client, expected)
