"""Speculation on the other kinds of target: latent attention, with selected keys and without, and
experts."""

from functools import cache

import pytest
import torch

from models.loader import ModelDescription
from tests.decode.test_speculation import (
    SHAPES,
    assert_nothing_leaked,
    grid,
    requests,
    shown,
    speculating,
)
from tests.support.drafts.drafters import OracleDrafter, Shape
from tests.support.models.tiny_models import (
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GEMMA3,
    GEMMA4,
    GLM4_MOE,
    GLM_DSA,
    HYBRID_MOE,
    QWEN3_MOE,
    tiny,
)
from tests.support.pool.local_pool import Answer, local_pool

TARGETS = {
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-v3.2": DEEPSEEK_V32,
    "glm-5": GLM_DSA,
    "qwen3-moe": QWEN3_MOE,
    "glm4-moe": GLM4_MOE,
    "qwen3.5-moe": HYBRID_MOE,
    "gemma-3": {**GEMMA3, "sliding_window": 33},
    "gemma-4": {**GEMMA4, "sliding_window": 33},
}
SELECTING = ("deepseek-v3.2", "glm-5")
WINDOWED = ("gemma-3", "gemma-4")  # which verify chains only; their windows are whole pages
WANTED = requests(
    max_tokens=10
)  # greedy and sampled, with penalties, biases, bans and a stop token


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@cache
def described(target: str) -> ModelDescription:
    family, _, dtype = target.partition(" ")
    return tiny(TARGETS[family], dtype or "float32")


@cache
def reference(target: str) -> list[Answer]:
    """Run every request alone, without speculation, in one process."""
    with local_pool(described(target), chunk_tokens=512) as pool:
        return [pool.generate([request])[0] for request in WANTED]


def drafter_for(target: str, shape: Shape, *, error_rate: float) -> OracleDrafter:
    """Return a drafter that knows the outputs by the keys of a fresh pool, and some tokens that
    never follow."""
    truth = {
        key: [*request.prompt_token_ids, *(token.token_id for token in answer.tokens), 11, 12, 13]
        for key, (request, answer) in enumerate(
            zip(WANTED, reference(target), strict=True), start=1
        )
    }
    return OracleDrafter(shape, truth if error_rate < 1 else {}, error_rate)


def assert_changes_nothing(target: str, size: int, drafter: OracleDrafter, tp: int = 1) -> None:
    with local_pool(described(target), size, speculation=speculating(drafter), tp=tp) as pool:
        assert shown(pool.generate(WANTED)) == shown(reference(target))
        assert_nothing_leaked(pool)


@pytest.mark.parametrize(("target", "shape", "size"), grid(SELECTING, [1, 2, 3]))
def test_a_draft_that_is_always_right_s2_6(target: str, shape: str, size: int) -> None:
    """Of GLM-5's three stages two begin with sharing layers: selections of trees cross the
    boundaries."""
    drafter = drafter_for(target, SHAPES[shape], error_rate=0)
    assert_changes_nothing(target, size, drafter)
    if drafter.shape.width == 1:  # the last step of a request may be cut short, nothing else
        num_generated = sum(len(answer.tokens) - 1 for answer in reference(target))
        depth = drafter.shape.depth
        assert sum(drafter.accepted) >= num_generated * depth // (depth + 1) - len(WANTED) * depth


@pytest.mark.parametrize(
    ("shape", "size"),
    [("chain 1", 1), ("chain 3", 2), ("chain 5", 3), ("tree 4x4/15", 3), ("tree 8x5/31", 2)],
)
@pytest.mark.parametrize(
    "target",
    [*(target for target in TARGETS if target not in (*SELECTING, *WINDOWED)), "glm-5 bfloat16"],
)
def test_a_draft_that_is_sometimes_right(target: str, shape: str, size: int) -> None:
    drafter = drafter_for(target, SHAPES[shape], error_rate=0.3)
    assert_changes_nothing(target, size, drafter)
    assert sum(drafter.accepted) > 0


@pytest.mark.parametrize(("target", "size"), [("gemma-3", 2), ("gemma-4 bfloat16", 3)])
def test_rejected_tokens_leave_windows_unchanged(target: str, size: int) -> None:
    drafter = drafter_for(target, SHAPES["chain 5"], error_rate=0.5)
    assert_changes_nothing(target, size, drafter)
    assert sum(drafter.accepted) > 0


@pytest.mark.parametrize(
    ("target", "shape", "size"), [("qwen3.5-moe", "tree 4x4/15", 1), ("glm-5", "chain 3", 2)]
)
def test_ranks_verify_together(target: str, shape: str, size: int) -> None:
    drafter = drafter_for(target, SHAPES[shape], error_rate=0.3)
    assert_changes_nothing(target, size, drafter, tp=2)
    assert sum(drafter.accepted) > 0


@pytest.mark.parametrize(("shape", "size"), [("chain 5", 3), ("tree 8x5/31", 2)])
@pytest.mark.parametrize("target", SELECTING)
def test_a_random_draft(target: str, shape: str, size: int) -> None:
    assert_changes_nothing(target, size, drafter_for(target, SHAPES[shape], error_rate=1))


def test_preempted_and_replayed() -> None:
    """Known tokens run again as chains. Admission alone needs all 23 pages, the longer outputs
    more."""
    wanted = requests(max_tokens=36)
    with local_pool(described("glm-5")) as pool:
        plain = pool.generate(wanted)
    drafter = OracleDrafter(
        SHAPES["chain 3"],
        {
            key: [*request.prompt_token_ids, *(token.token_id for token in answer.tokens)]
            for key, (request, answer) in enumerate(zip(wanted, plain, strict=True), start=1)
        },
        error_rate=0.3,
    )
    with local_pool(described("glm-5"), 2, num_pages=24, speculation=speculating(drafter)) as pool:
        answers = pool.generate(wanted)
        assert_nothing_leaked(pool)
    assert shown(answers) == shown(plain)
    assert (
        sum(answer.finished.num_preemptions for answer in answers if answer.finished is not None)
        > 0
    )


@pytest.mark.parametrize(("shape", "size"), [("chain 5", 1), ("tree 4x4/15", 2)])
@pytest.mark.parametrize("target", SELECTING)
def test_alone(target: str, shape: str, size: int) -> None:
    for request, answer in list(zip(WANTED, reference(target), strict=True))[1:4:2]:
        truth = [*request.prompt_token_ids, *(token.token_id for token in answer.tokens)]
        drafter = OracleDrafter(SHAPES[shape], {1: truth}, error_rate=0.2)
        with local_pool(described(target), size, speculation=speculating(drafter)) as pool:
            assert shown(pool.generate([request])) == shown([answer])
