"""Reference responses of one process, without any handoff, stage or draft."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy
import torch

from baton.values import Query
from bench.storm.verdict import ScoredTokens
from engine.core.request import Request, SamplingParams
from models.adapters import read_adapters
from models.loader import read_model
from tests.support.pool.local_pool import LocalPool, local_pool

PAGE_SIZE = 64
NUM_PAGES = 256
MAX_RUNNING = 8


def truths(
    model: Path, questions: Sequence[Query], *, adapters: Path | None = None
) -> list[list[ScoredTokens]]:
    """Return the right response of each question, as the only one; one question after another."""
    torch.set_num_threads(1)
    description = read_model(model)
    if adapters is not None:
        description = replace(description, adapters=read_adapters(adapters))
    keys = {f":{adapter.name}": adapter.key for adapter in description.adapters}
    with local_pool(
        description, page_size=PAGE_SIZE, num_pages=NUM_PAGES, max_running=MAX_RUNNING
    ) as pool:
        return [
            [_response(pool, _request(question, keys.get(question.model, "")))]
            for question in questions
        ]


def _response(pool: LocalPool, request: Request) -> ScoredTokens:
    return [
        (token.token_id, float(numpy.float32(token.logprobs.logprob)))
        for token in pool.generate([request])[0].tokens
        if token.logprobs is not None
    ]


def _request(query: Query, adapter: str) -> Request:
    sampling = query.sampling
    assert isinstance(query.prompt, tuple)
    assert query.stop.max_tokens is not None
    defaults = SamplingParams()
    params = SamplingParams(
        temperature=1.0 if sampling.temperature is None else sampling.temperature,
        top_p=defaults.top_p if sampling.top_p is None else sampling.top_p,
        top_k=defaults.top_k if sampling.top_k is None else sampling.top_k,
        repetition_penalty=defaults.repetition_penalty
        if sampling.repetition_penalty is None
        else sampling.repetition_penalty,
        seed=defaults.seed if sampling.seed is None else sampling.seed,
    )
    return Request(
        "truth",
        tuple(token for token in query.prompt if isinstance(token, int)),
        query.stop.max_tokens,
        params,
        num_top_logprobs=0,
        adapter=adapter,
    )
