"""Every family's tiny checkpoint served by a real cluster: prefill in two stages, decode in three."""

import asyncio

import pytest

from tests.cluster.conftest import Reference
from tests.cluster.test_equality import on_the_wire
from tests.support.checkpoints import FAMILY_NAMES, make_checkpoint
from tests.support.clusters import running_cluster
from tests.support.questions import as_query, make_questions, shown


@pytest.mark.parametrize("family", FAMILY_NAMES)
async def test_served_like_one_process(tmp_path_factory: pytest.TempPathFactory, family: str) -> None:
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("families"), family)
    questions = make_questions(4, seed=31, max_prompt=150, max_tokens=12)
    expected = on_the_wire(Reference(checkpoint).answers(questions))
    async with running_cluster(checkpoint, prefill_pp=2, decode_pp=3) as running:
        completions = await asyncio.gather(*(running.client.complete(as_query(question), timeout_s=60)
                                             for question in questions))
        assert [shown(completion) for completion in completions] == expected
        await running.until_clean()
