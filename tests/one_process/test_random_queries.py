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
from baton.values import Completion, Query, Sampling, Stop, StructuredOutput, Timings, Usage
from tests.one_process.test_random_clusters import drawn, write_files
from tests.support.cluster.one_process import cluster_in_process
from tests.support.grids import mostly_long
from tests.support.models.guided import write_character_tokenizer

NUM_QUERIES = 8
SCHEMAS = (
    '{"type": "array", "items": {"enum": ["red", 7]}, "minItems": 2, "maxItems": 4}',
    '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, '
    '"required": ["b"], "additionalProperties": false}',
)
REGEXES = ("(ab|cd){1,6}x?", "[0-9]{3,20}", "[a-c]*(yes|no)")


def random_query(dice: random.Random, adapters: tuple[str, ...]) -> Query:
    def perhaps(chance: float, *values: float) -> float | None:
        return dice.choice(values) if dice.random() < chance else None

    adapter = dice.choice(adapters)
    structured = None
    if dice.random() < 0.35:
        structured = dice.choice(
            (StructuredOutput(dice.choice(SCHEMAS)), StructuredOutput(regex=dice.choice(REGEXES)))
        )
    max_tokens = dice.choice((1, 2, 12, 30))
    return Query(
        tuple(dice.choices(range(33, 120), k=dice.choice((1, 3, 20, 70)))),
        Sampling(
            temperature=dice.choice((0.0, 0.7, 1.3)),
            top_p=perhaps(0.3, 0.5, 0.95),
            top_k=dice.choice((None, 5, 50)),
            min_p=perhaps(0.2, 0.05),
            frequency_penalty=perhaps(0.3, 0.5, -0.5),
            presence_penalty=perhaps(0.3, 0.7),
            repetition_penalty=perhaps(0.3, 1.2),
            seed=dice.randrange(2**63),
            logit_bias={dice.randrange(33, 120): dice.choice((-4.0, 6.0)) for _ in range(2)},
        ),
        Stop(
            max_tokens=max_tokens,
            min_tokens=dice.choice((None, 0, min(5, max_tokens))) if structured is None else None,
            strings=dice.choice(((), ("e",), ("ab", "qu", "x"))),
            ignore_eos=structured is None and dice.random() < 0.7,
        ),
        model=adapter and f":{adapter}",
        num_top_logprobs=dice.choice((None, 0, 4)),
        num_prompt_logprobs=dice.choice((None, None, 0, 3)),
        structured_output=structured,
        n=dice.choice((None, None, 3)),
    )


def answer(completion: Completion) -> Completion:
    """Return what must be equal in all clusters: all but the times, the id and the tokens cached."""
    usage = completion.finish.usage
    usage = Usage(usage.prompt_tokens, usage.completion_tokens)
    finish = replace(completion.finish, timings=Timings(), request_id="", usage=usage)
    return replace(completion, finish=finish)


async def ask(client: AsyncBatonClient, query: Query) -> list[Completion]:
    return [answer(each) for each in await client.choices(query, timeout_s=100)]


async def check(
    client: AsyncBatonClient, query: Query, expected: list[Completion], dice: random.Random
) -> None:
    """Ask in several ways at once; all must give the expected answers."""
    ways = [
        query,
        replace(query, prefix_cache=False, speculate=False),
        replace(query, cache_salt="salt", priority=dice.choice((0, 3, 20))),
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
    queries = [random_query(dice, cluster.adapters) for _ in range(NUM_QUERIES)]
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
