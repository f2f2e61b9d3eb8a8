"""A whole cluster with a draft on its decode pool: the output of one process without a draft, bit
for bit."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.cluster.clusters import (
    RunningCluster,
    running_cluster,
    samples_of,
    scrape,
)
from tests.support.cluster.questions import as_query, make_questions, on_the_wire, shown
from tests.support.cluster.reference import Reference
from tests.support.drafts.eagle import save_draft


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_draft(tmp_path_factory.mktemp("drafts") / "eagle3", layers=(0, 1, 3))


async def assert_declined_drafts_are_not_drafted(
    running: RunningCluster, expected: Sequence[object]
) -> None:
    """Check for equal responses without a change of any speculation metric."""
    leader = next(name for name in running.cluster.processes if name in ("decode-0", "decode-0.0"))
    port = await running.metrics_port(leader)
    before = await asyncio.to_thread(scrape, port)
    completions = await asyncio.gather(
        *(
            running.client.complete(replace(as_query(question), speculate=False), timeout_s=60)
            for question in make_questions(6)
        )
    )
    assert [shown(completion) for completion in completions] == expected
    after = await asyncio.to_thread(scrape, port)
    assert before["baton_spec_drafted_tokens"] > 0
    for name in (
        "baton_spec_drafted_tokens",
        "baton_spec_accepted_tokens",
        "baton_spec_accept_length",
    ):
        assert after[name] == before[name], name


REPEATING = [
    replace(
        question,
        prompt_token_ids=(*question.prompt_token_ids[:20], *question.prompt_token_ids[:20]) * 3,
        max_tokens=24,
        sampling=replace(question.sampling, logit_bias=tuple((token, 100.0) for token in (5, 6))),
    )
    for question in make_questions(6)
]


@pytest.mark.parametrize("worker", [0, 1], ids=["two stages", "both roles"])
async def test_drafts_from_the_own_text_change_nothing(
    checkpoint: Path, reference: Reference, worker: int
) -> None:
    flags = ("--draft", "suffix", "--spec-draft-tokens", "8", "--no-spec-adaptive")
    expected = on_the_wire(reference.answers(REPEATING))
    async with running_cluster(
        checkpoint,
        prefill=1 - worker,
        decode=1 - worker,
        worker=worker,
        prefill_pp=2,
        decode_pp=2,
        worker_flags=flags,
    ) as running:
        completions = await asyncio.gather(
            *(running.client.complete(as_query(each), timeout_s=60) for each in REPEATING)
        )
        assert [shown(completion) for completion in completions] == expected
        leader = next(
            name for name in running.cluster.processes if name.startswith(("decode-0", "worker-0"))
        )
        port = await running.metrics_port(leader)
        accepted = await asyncio.to_thread(samples_of, port, "baton_spec_accepted_tokens_total")
        assert sum(count for labels, count in accepted.items() if "suffix" in labels) > 0
        await running.until_clean()


@pytest.mark.parametrize(
    ("prefill_pp", "decode_pp", "shape", "more"),
    [
        (1, 1, ("4", "3", "8"), ()),
        (2, 2, ("1", "3", "3"), ()),
        (1, 3, ("4", "4", "15"), ("--no-spec-prompt",)),
    ],
    ids=["tree", "chain", "large tree without the prompt"],
)
async def test_a_draft_changes_nothing(
    checkpoint: Path,
    draft: Path,
    reference: Reference,
    prefill_pp: int,
    decode_pp: int,
    shape: tuple[str, str, str],
    more: tuple[str, ...],
) -> None:
    topk, steps, tokens = shape
    flags = (
        "--draft",
        str(draft),
        "--spec-topk",
        topk,
        "--spec-steps",
        steps,
        "--spec-draft-tokens",
        tokens,
        *more,
    )
    expected = on_the_wire(reference.answers(make_questions(6)))
    async with running_cluster(
        checkpoint, prefill_pp=prefill_pp, decode_pp=decode_pp, worker_flags=flags
    ) as running:
        completions = await asyncio.gather(
            *(
                running.client.complete(as_query(question), timeout_s=60)
                for question in make_questions(6)
            )
        )
        assert [shown(completion) for completion in completions] == expected
        await assert_declined_drafts_are_not_drafted(running, expected)
        await running.until_clean()
