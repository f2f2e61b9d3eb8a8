"""Random requests with everything that the API has: a random cluster gives the answers of one process.

Grammars, choices, penalties, logprobs of output and prompt, stop strings and least lengths are drawn
together. Each is asked with and without the caches and drafts, and resumed at random places.
"""

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest

from baton.client import AsyncBatonClient
from baton.values import Completion, Query
from tests.one_process.test_random_clusters import drawn, write_files
from tests.support.cluster.one_process import cluster_in_process
from tests.support.cluster.queries import comparable, random_query
from tests.support.grids import mostly_long
from tests.support.models.guided import write_character_tokenizer

NUM_QUERIES = 8


async def ask(client: AsyncBatonClient, query: Query) -> list[Completion]:
    return [comparable(each) for each in await client.choices(query, timeout_s=100)]


async def check(
    client: AsyncBatonClient, query: Query, expected: list[Completion], dice: random.Random
) -> None:
    """Ask in several ways at once; all must give the expected answers."""
    ways = [
        query,
        replace(query, prefix_cache=False, speculate=False),
        replace(query, cache_salt="salt", priority=dice.choice((0, 3, 20))),
        replace(query, session_id="s", retention_s=dice.choice((None, 0.0, 60.0))),
        replace(query, session_id="s", ends_session=True),
        query,
    ]
    for found in await asyncio.gather(*(ask(client, way) for way in ways)):
        assert found == expected, query
    counts = [dice.randint(0, len(each.token_ids)) for each in expected]
    resumed = tuple(each.token_ids[:count] for each, count in zip(expected, counts, strict=True))
    rests = await ask(client, replace(query, resumed=resumed))
    for whole, count, rest in zip(expected, counts, rests, strict=True):
        assert rest.token_ids == whole.token_ids[count:], (query, counts)
        assert rest.logprobs == whole.logprobs[count:], (query, counts)
        assert whole.text.endswith(rest.text), (query, counts)
        assert rest.finish == whole.finish, (query, counts)


@pytest.mark.parametrize("seed", mostly_long(range(24), kept=(0,)))
async def test_any_request_has_one_answer(seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    cluster = drawn(dice, tmp_path)
    model = write_files(cluster, tmp_path)
    write_character_tokenizer(model)
    models = tuple(adapter and f":{adapter}" for adapter in cluster.adapters)
    queries = [
        random_query(
            dice,
            dice.choices(range(33, 120), k=dice.choice((1, 3, 20, 70))),
            models=models,
            max_tokens=dice.choice((1, 2, 12, 30)),
        )
        for _ in range(NUM_QUERIES)
    ]
    plain = {
        name: value for name, value in cluster.settings.items() if name in ("weights", "adapters")
    }
    async with cluster_in_process(model, worker={}, **plain) as client:
        expected = await asyncio.gather(*(ask(client, query) for query in queries))
    async with cluster_in_process(model, **cluster.layout, **cluster.settings) as client:
        await asyncio.gather(
            *(
                check(client, query, answers, dice)
                for query, answers in zip(queries, expected, strict=True)
            )
        )
