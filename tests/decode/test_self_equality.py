"""One pool, every shape: the same tokens and the same bits of their logprobs."""

import random
from dataclasses import replace

import pytest
import torch

from decode.entry import Finished
from engine.core.request import Request, SamplingParams
from models.loader import ModelDescription
from tests.support.models.tiny_models import HYBRID, LLAMA, QWEN3, tiny
from tests.support.pool.local_pool import Answer, local_pool

PROMPT_LENGTHS = (1, 5, 63, 64, 65, 130)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def requests(max_tokens: int = 24) -> list[Request]:
    """Return greedy and sampled requests that cover every kind of penalty and filter."""
    rng = random.Random(0)
    sampling = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.8, seed=1),
        SamplingParams(temperature=1.0, top_k=20, top_p=0.9, seed=2),
        SamplingParams(temperature=1.2, min_p=0.02, seed=3, repetition_penalty=1.2),
        SamplingParams(temperature=0, frequency_penalty=0.5, presence_penalty=0.5),
        SamplingParams(temperature=1.0, seed=2**63 + 5, logit_bias=((7, 3.0), (9, -100.0))),
    ]
    return [
        Request(
            f"r{i}",
            tuple(rng.randrange(3, 256) for _ in range(length)),
            max_tokens,
            params,
            num_top_logprobs=3,
        )
        for i, (length, params) in enumerate(zip(PROMPT_LENGTHS, sampling, strict=True))
    ]


def shown(answers: list[Answer]) -> list[list[object]]:
    assert all(answer.finished is not None and answer.failed is None for answer in answers)
    return [list(answer.tokens) for answer in answers]


@pytest.fixture(
    scope="module", params=["hybrid-float32", "hybrid-bfloat16", "llama-float32", "qwen3-bfloat16"]
)
def description(request: pytest.FixtureRequest) -> ModelDescription:
    family, dtype = request.param.split("-")
    return tiny({"hybrid": HYBRID, "llama": LLAMA, "qwen3": QWEN3}[family], dtype)


@pytest.fixture(scope="module")
def reference(description: ModelDescription) -> list[list[object]]:
    """Run every request alone in one process, its prompt in one chunk."""
    torch.set_num_threads(1)
    with local_pool(description, chunk_tokens=512) as pool:
        return [shown(pool.generate([request]))[0] for request in requests()]


@pytest.mark.parametrize(
    ("size", "partition"), [(1, None), (2, None), (3, None), (4, None), (5, None), (3, "1,3,1")]
)
def test_batched_and_staged_equals_alone_s0_7(
    description: ModelDescription, reference: list[list[object]], size: int, partition: str | None
) -> None:
    with local_pool(description, size, partition=partition) as pool:
        assert shown(pool.generate(requests())) == reference


@pytest.mark.parametrize("chunk_tokens", [64, 128])
@pytest.mark.parametrize("page_size", [16, 64])
def test_chunks_and_pages_change_nothing(
    description: ModelDescription, reference: list[list[object]], chunk_tokens: int, page_size: int
) -> None:
    with local_pool(description, 2, chunk_tokens=chunk_tokens, page_size=page_size) as pool:
        answers = shown(pool.generate(list(reversed(requests()))))
    # Attention accumulates page by page, so another page size is another, equally exact, order of
    # sums.
    if page_size == 16:
        assert answers[::-1] == reference
    else:
        with local_pool(description, 1, page_size=page_size) as pool:
            assert shown(pool.generate(requests())) == answers[::-1]


@pytest.mark.parametrize("size", [1, 2])
def test_preempted_and_replayed_equals_undisturbed(
    description: ModelDescription, reference: list[list[object]], size: int
) -> None:
    # 6 requests want 33 pages in the end; admission alone needs 29.
    with local_pool(description, size, num_pages=31) as pool:
        answers = pool.generate(requests())
    assert shown(answers) == reference
    assert (
        sum(
            answer.finished.num_preemptions
            for answer in answers
            if isinstance(answer.finished, Finished)
        )
        > 0
    )


def test_a_seed_is_the_only_source_of_chance(description: ModelDescription) -> None:
    base = requests()[1]
    other = replace(base, sampling=replace(base.sampling, seed=99))
    with local_pool(description) as pool:
        first, again, different = shown(pool.generate([base, base, other]))
    assert first == again
    assert first != different
