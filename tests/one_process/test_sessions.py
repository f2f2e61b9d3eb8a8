"""Sessions in a cluster: turns that are still cached after a flood of other prompts, with the same
bits, and hints that change no response."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.values import Completion, Query
from engine.core.request import Request, SamplingParams
from tests.support.cluster.one_process import cluster_in_process
from tests.support.cluster.questions import as_query, on_the_wire, shown
from tests.support.cluster.reference import Reference
from tests.support.models.checkpoints import make_checkpoint

PAGE = 16
NUM_PAGES = 24  # of each pool; a turn takes 8, and a prompt of the flood 6
DICE = random.Random(3)
TURN = DICE.choices(range(3, 256), k=7 * PAGE + 1)
FLOOD = [DICE.choices(range(3, 256), k=5 * PAGE + 1) for _ in range(6)]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"worker": {}}),
    ("llama", {"prefill_pp": 2, "decode_pp": 2}),
    ("qwen3_5_text", {}),
]


def question(name: str, prompt: list[int]) -> Request:
    return Request(name, tuple(prompt), 4, SamplingParams(temperature=0.0), num_top_logprobs=0)


@pytest.mark.parametrize(("family", "layout"), CASES, ids=str)
async def test_a_turn_of_a_session_is_cached_after_a_flood(
    family: str, layout: dict[str, Any], tmp_path: Path
) -> None:
    model = make_checkpoint(tmp_path, family)
    asked = question("turn", TURN)
    expected = on_the_wire(Reference(model).answers([asked]))[0]
    settings = {"page_size": PAGE, "num_pages": NUM_PAGES}

    async with cluster_in_process(model, **{**layout, **settings}) as client:

        async def ask(query: Query) -> Completion:
            return await client.complete(replace(query, request_id=""), timeout_s=60)

        async def cached_after_flood(query: Query) -> int:
            """Return how many tokens of the turn are cached when it comes again after a flood."""
            assert shown(await ask(query)) == expected
            for number, prompt in enumerate(FLOOD):
                flood = as_query(question(f"flood-{number}", prompt))
                await ask(replace(flood, cache_salt=query.cache_salt))
            second = await ask(query)
            assert shown(second) == expected
            return second.finish.usage.cached_tokens

        turn = as_query(asked)
        named = replace(turn, session_id="s")
        assert await cached_after_flood(turn) == 0
        for kept in (
            replace(named, cache_salt="named"),
            replace(turn, cache_salt="kept", retention_s=600.0),
        ):
            assert await cached_after_flood(kept) >= 4 * PAGE
        for gone in (
            replace(named, cache_salt="short", retention_s=0.0),
            replace(named, cache_salt="ended", ends_session=True),
        ):
            assert await cached_after_flood(gone) == 0
