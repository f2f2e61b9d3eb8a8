"""A small worker of both roles with more requests than it holds: none waits for another forever."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.values import Completion
from tests.support.cluster.one_process import cluster_in_process
from tests.support.cluster.questions import as_query, make_questions, on_the_wire, shown
from tests.support.cluster.reference import Reference
from tests.support.models.checkpoints import make_checkpoint


@pytest.mark.parametrize(
    "settings",
    [
        {"max_running": 1},
        {"max_running": 1, "worker_pp": 2},
        {"max_running": 3, "page_size": 16, "num_pages": 25},  # requests are preempted
    ],
    ids=str,
)
async def test_scored_prompts_and_others_do_not_wait_for_each_other(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """A scored prompt is computed before its request joins those that decode. It holds a place for
    prompts until then, and all places for decoding may be taken by requests whose prompts wait."""
    model = make_checkpoint(tmp_path, "llama")
    asked = make_questions(12, seed=4, max_prompt=100)
    expected = on_the_wire(Reference(model).answers(asked))
    async with cluster_in_process(model, worker={}, **settings) as client:

        async def ask(number: int) -> Completion:
            query = replace(as_query(asked[number]), request_id="")
            scored = replace(query, num_prompt_logprobs=0) if number % 3 == 1 else query
            return await client.complete(scored, timeout_s=60)

        answers = await asyncio.gather(*map(ask, range(len(asked))))
    assert list(map(shown, answers)) == expected
