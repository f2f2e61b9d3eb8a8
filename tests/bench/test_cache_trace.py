"""Requests of `bench.cache_trace`: those of a trace, scaled down, with the same shared prefixes."""

from baton.values import ModelInfo, Query
from baton.workload import Planned
from bench.cache_trace import query_of

INFO = ModelInfo(
    model="m",
    architecture="M",
    vocab_size=300,
    max_context_tokens=200,
    num_layers=1,
    eos_token_ids=(2,),
    has_tokenizer=False,
    has_chat_template=False,
    revision="",
)


def prompt_of(query: Query) -> list[int]:
    return [token for token in query.prompt if isinstance(token, int)]


def test_prompts_share_tokens_of_shared_blocks() -> None:
    """512 tokens of a block are 16 at a scale of 32."""
    first, second = (
        query_of(INFO, index, Planned(0.0, 1600, 320, blocks), 32)
        for index, blocks in enumerate(((1, 2, 3), (1, 2, 4)))
    )
    assert prompt_of(first)[:32] == prompt_of(second)[:32]
    assert prompt_of(first)[32:48] != prompt_of(second)[32:48]
    assert [len(prompt_of(query)) for query in (first, second)] == [50, 50]
    assert [query.stop.max_tokens for query in (first, second)] == [10, 10]
    assert 2 not in prompt_of(first)


def test_prompts_longer_than_the_context_are_truncated() -> None:
    query = query_of(INFO, 0, Planned(0.0, 64_000, 32_000, (1,)), 32)
    assert (len(prompt_of(query)), query.stop.max_tokens) == (100, 100)
