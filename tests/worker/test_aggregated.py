"""A pool of both roles gives the bits of one process that does one request at a time."""

from functools import cache

import pytest
import torch

from models.loader import ModelDescription
from tests.decode.test_speculation import SHAPES, requests, shown, speculating
from tests.support.drafts.drafters import OracleDrafter
from tests.support.models.tiny_models import (
    DEEPSEEK_V3,
    GEMMA4,
    GLM_DSA,
    HYBRID,
    KIMI_LINEAR,
    LLAMA,
    QWEN3_MOE,
    tiny,
)
from tests.support.pool.aggregated_pool import aggregated_pool
from tests.support.pool.local_pool import Answer, Speculation, local_pool

FAMILIES = {
    "llama": LLAMA,
    "hybrid": HYBRID,
    "KDA": KIMI_LINEAR,
    "MLA": DEEPSEEK_V3,
    "DSA": GLM_DSA,
    "experts": QWEN3_MOE,
    "windows": {**GEMMA4, "sliding_window": 33},
}
WANTED = requests(max_tokens=12)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@cache
def described(family: str) -> ModelDescription:
    return tiny(FAMILIES[family], "float32")


@cache
def reference(family: str) -> list[Answer]:
    """Run every request alone, in one process."""
    with local_pool(described(family), chunk_tokens=512) as pool:
        return [pool.generate([request])[0] for request in WANTED]


def speculation_of(family: str, shape: str | None) -> Speculation | None:
    """Return a draft that is wrong at times, or None."""
    if shape is None:
        return None
    truth = {
        key: [*request.prompt_token_ids, *(token.token_id for token in answer.tokens), 11, 12, 13]
        for key, (request, answer) in enumerate(
            zip(WANTED, reference(family), strict=True), start=1
        )
    }
    return speculating(OracleDrafter(SHAPES[shape], truth, 0.3))


@pytest.mark.parametrize(
    ("family", "size", "tp", "draft"),
    [
        ("llama", 1, 1, None),
        ("llama", 2, 2, "chain 3"),
        ("llama", 1, 1, "tree 4x4/15"),
        ("hybrid", 1, 1, None),
        ("hybrid", 2, 1, "tree 4x4/15"),
        ("hybrid", 1, 2, "chain 3"),
        ("KDA", 2, 2, None),
        ("KDA", 1, 1, "chain 3"),
        ("MLA", 1, 2, "tree 4x4/15"),
        ("MLA", 2, 1, "chain 3"),
        ("DSA", 2, 1, None),
        ("DSA", 1, 1, "chain 3"),
        ("experts", 2, 2, "tree 4x4/15"),
        ("experts", 1, 1, None),
        ("windows", 2, 1, None),
        ("windows", 1, 2, "chain 3"),
    ],
)
def test_both_roles_in_one_pool_change_no_bit(
    family: str, size: int, tp: int, draft: str | None
) -> None:
    """Cold, then from the cache that the first round has left."""
    with aggregated_pool(
        described(family), size, speculation=speculation_of(family, draft), tp=tp
    ) as pool:
        for _ in range(2):
            assert shown(pool.generate(WANTED)) == shown(reference(family))
        pool.check_empty()
