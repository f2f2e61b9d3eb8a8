"""A whole cluster with a draft on its decode pool: the answers of one process without any, bit for bit."""

import asyncio
from pathlib import Path

import pytest

from tests.cluster.conftest import Reference
from tests.cluster.test_equality import on_the_wire
from tests.support.clusters import running_cluster
from tests.support.eagle import save_draft
from tests.support.questions import as_query, make_questions, shown


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_draft(tmp_path_factory.mktemp("drafts") / "eagle3", layers=(0, 1, 3))


@pytest.mark.parametrize(("prefill_pp", "decode_pp", "shape", "more"), [
    (1, 1, ("4", "3", "8"), ()), (2, 2, ("1", "3", "3"), ()), (1, 3, ("4", "4", "15"), ("--no-spec-prompt",))],
    ids=["tree", "chain", "large tree without the prompt"])
async def test_a_draft_changes_nothing(checkpoint: Path, draft: Path, reference: Reference, prefill_pp: int,
                                       decode_pp: int, shape: tuple[str, str, str], more: tuple[str, ...]) -> None:
    topk, steps, tokens = shape
    flags = ("--draft", str(draft), "--spec-topk", topk, "--spec-steps", steps, "--spec-draft-tokens", tokens, *more)
    expected = on_the_wire(reference.answers(make_questions(6)))
    async with running_cluster(checkpoint, prefill_pp=prefill_pp, decode_pp=decode_pp, worker_flags=flags) as running:
        completions = await asyncio.gather(*(running.client.complete(as_query(question), timeout_s=60)
                                             for question in make_questions(6)))
        assert [shown(completion) for completion in completions] == expected
        await running.until_clean()
