"""Requests in the client's and the engine's form, to compare clusters with one process."""

import random

import numpy as np

from baton.values import Completion, Query, Sampling, Stop
from engine.core.request import Request, SamplingParams

Shown = list[tuple[int, float | None]]


def make_questions(
    count: int, *, seed: int = 0, max_prompt: int = 200, max_tokens: int = 24, vocab_size: int = 256
) -> list[Request]:
    """Return requests of mixed lengths with logprobs, every other one sampled with penalties and
    the rest greedy."""
    rng = random.Random(seed)
    questions = []
    for i in range(count):
        prompt = tuple(rng.randrange(3, vocab_size) for _ in range(rng.randint(1, max_prompt)))
        params = SamplingParams(temperature=0.0)
        if i % 2:
            params = SamplingParams(
                temperature=0.9,
                top_p=0.95,
                top_k=50,
                repetition_penalty=1.1,
                presence_penalty=0.2,
                seed=rng.randrange(2**63),
            )
        questions.append(
            Request(f"q{seed}-{i}", prompt, rng.randint(1, max_tokens), params, num_top_logprobs=0)
        )
    return questions


def as_query(request: Request) -> Query:
    """Return the client's query, without end-of-sequence ids: tiny random models sample them at
    random, and lengths should be known."""
    params = request.sampling
    return Query(
        prompt=tuple(request.prompt_token_ids),
        request_id=request.request_id,
        model=request.adapter and f":{request.adapter}",
        skip_text=True,
        num_top_logprobs=request.num_top_logprobs,
        stop=Stop(max_tokens=request.max_tokens, ignore_eos=True),
        sampling=Sampling(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            repetition_penalty=params.repetition_penalty,
            seed=params.seed,
            logit_bias=dict(params.logit_bias),
        ),
    )


def shown(completion: Completion) -> Shown:
    """Return a response like `Reference.answers`. Logprobs cross the client's wire as 32-bit
    floats."""
    return [
        (token_id, logprobs.logprob)
        for token_id, logprobs in zip(completion.token_ids, completion.logprobs, strict=True)
    ]


def on_the_wire(answers: list[Shown]) -> list[Shown]:
    """Round logprobs to the 32 bits they have in the API."""
    return [
        [
            (token, None if logprob is None else float(np.float32(logprob)))
            for token, logprob in answer
        ]
        for answer in answers
    ]
