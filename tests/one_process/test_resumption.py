"""A client that resumes a response gets the remaining tokens with the same bits: drafts, grammars,
penalties, several choices, stop strings. Routers that die are in test_routers.py."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from baton.client import AsyncBatonClient
from baton.values import Completion, Query, Sampling, Stop, StructuredOutput, Timings
from runtime.errors import InvalidRequestError
from tests.support.cluster.one_process import cluster_in_process
from tests.support.drafts.eagle import save_draft
from tests.support.models.guided import write_character_tokenizer

SCHEMA = (
    '{"type": "array", "items": {"enum": ["red", "green", 7]}, "minItems": 3, "maxItems": 5, '
    '"x-guidance": {"whitespace_flexible": false}}'
)
LONG = Stop(max_tokens=20, ignore_eos=True)
QUERIES = (
    Query((5, 6, 7, 8), Sampling(temperature=0), LONG, num_top_logprobs=2, num_prompt_logprobs=1),
    Query(
        (5, 6, 7, 9),
        Sampling(temperature=1.2, top_p=0.9, seed=3, repetition_penalty=1.3, frequency_penalty=0.4),
        LONG,
        num_top_logprobs=0,
    ),
    Query((5, 6), Sampling(temperature=1.1, seed=2**64 - 1), LONG, num_top_logprobs=0, n=2),
    Query(
        (9, 8),
        Sampling(temperature=1.4, seed=4),
        Stop(max_tokens=80),
        structured_output=StructuredOutput(SCHEMA),
    ),
    Query((9, 8), Sampling(temperature=0.9, seed=5), LONG, num_top_logprobs=0, speculate=False),
)


def expected_of(whole: Completion, count: int, rest: Completion) -> Completion:
    """Return the output after the first `count` tokens; the caller compares the text."""
    finish = replace(whole.finish, timings=Timings(), request_id="")
    return replace(
        whole,
        text=rest.text,
        token_ids=whole.token_ids[count:],
        logprobs=whole.logprobs[count:],
        finish=finish,
        prompt_logprobs=() if count else whole.prompt_logprobs,
    )


async def check(client: AsyncBatonClient, query: Query) -> None:
    """Resume at several places, each choice at a different one."""
    whole = await client.choices(query, timeout_s=60)
    length = len(whole[0].token_ids)
    for count in (0, 1, 2, length // 2, length - 1, length):
        counts = [
            min((count + 3 * index) % (length + 1), len(choice.token_ids))
            for index, choice in enumerate(whole)
        ]
        resumed = tuple(choice.token_ids[:each] for choice, each in zip(whole, counts, strict=True))
        rests = await client.choices(replace(query, resumed=resumed), timeout_s=60)
        for choice, each, rest in zip(whole, counts, rests, strict=True):
            found = replace(rest, finish=replace(rest.finish, timings=Timings(), request_id=""))
            assert found == expected_of(choice, each, rest), (query, each)
            assert choice.text.endswith(rest.text)


async def test_a_resumed_response_has_the_bits_of_the_whole(
    checkpoint: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(checkpoint, model)
    write_character_tokenizer(model)
    draft = save_draft(tmp_path / "eagle3", layers=(0, 1, 3))
    async with cluster_in_process(model, decode_pp=2, draft=draft) as client:
        for query in QUERIES:
            await check(client, query)
        text = (await client.complete(QUERIES[1], timeout_s=60)).text
        await check(client, replace(QUERIES[1], stop=replace(LONG, strings=(text[9:12],))))
        with pytest.raises(InvalidRequestError, match="resumed: begins with"):
            await client.complete(replace(QUERIES[0], resumed=((250, 3),)), timeout_s=60)
        first = (await client.complete(QUERIES[3], timeout_s=60)).token_ids[0]
        with pytest.raises(InvalidRequestError, match="structured_output"):
            await client.complete(replace(QUERIES[3], resumed=((first, 250),)), timeout_s=60)
