"""In exact numerics every way to run a prompt gives the same bits: whole, chunked, cut at any
layer, alone, in a batch.

Caches are compared too, so a difference that the last logits happen to hide is still found.
"""

import math

import pytest
import torch
from torch import Tensor

from engine.core.layer_range import get_pp_indices
from models.loader import ModelDescription, read_model
from tests.models.conftest import CheckpointMaker
from tests.support.models.checkpoints import FAMILY_NAMES, RELATED_NAMES
from tests.support.models.single_stage import StageDriver
from tests.support.models.tiny_models import KIMI_LINEAR, tiny

PROMPT = torch.randint(3, 240, (150,), generator=torch.Generator().manual_seed(7)).tolist()
OTHERS = {1: PROMPT[3:70], 2: PROMPT[:1], 3: PROMPT[20:149]}
CONTINUATION = [17, 200, 5]


@pytest.fixture(params=[*FAMILY_NAMES, *RELATED_NAMES])
def model(request: pytest.FixtureRequest, checkpoint: CheckpointMaker) -> ModelDescription:
    return read_model(checkpoint(request.param))


def run_alone(driver: StageDriver, chunk_tokens: int = len(PROMPT)) -> list[Tensor]:
    """Return the logits of the prompt's end and of each following step."""
    for start in range(0, len(PROMPT), chunk_tokens):
        chunk = PROMPT[start : start + chunk_tokens]
        is_last = start + chunk_tokens >= len(PROMPT)
        logits = driver.prefill({0: chunk}, samples=is_last)
    return [logits, *(driver.decode({0: token}) for token in CONTINUATION)]


def bits(tensor: Tensor) -> Tensor:
    """Return integers to compare, in which a NaN equals itself: pools hold NaN in unwritten
    places."""
    return tensor.contiguous().view(torch.int32 if tensor.dtype is torch.float32 else torch.int16)


def assert_same_caches(driver: StageDriver, reference: StageDriver) -> None:
    for key, pool in reference.pools.items():
        assert torch.equal(bits(driver.pools[key]), bits(pool)), key


def assert_same(
    driver: StageDriver, logits: list[Tensor], reference: StageDriver, expected: list[Tensor]
) -> None:
    for step, (ours, theirs) in enumerate(zip(logits, expected, strict=True)):
        assert torch.equal(ours, theirs), f"step {step}"
    assert_same_caches(driver, reference)


def test_chunked_prefill_equals_whole(model: ModelDescription) -> None:
    reference = StageDriver(model)
    expected = run_alone(reference)
    for chunk_tokens in (64, 128) if model.facts.chunk_grid == 64 else (1, 7, 33, 64, 149):
        driver = StageDriver(model)
        assert_same(driver, run_alone(driver, chunk_tokens), reference, expected)


def test_every_layer_cut_equals_whole_s0_7(model: ModelDescription) -> None:
    reference = StageDriver(model)
    expected = run_alone(reference)
    num_layers = model.facts.num_layers
    custom = f"1,{num_layers - 2},1"
    uneven = tuple(get_pp_indices(num_layers, rank, 3, custom).start for rank in (1, 2))
    for cuts in [*((cut,) for cut in range(1, num_layers)), uneven, tuple(range(1, num_layers))]:
        driver = StageDriver(model, cuts=cuts)
        assert_same(driver, run_alone(driver), reference, expected)


def test_row_in_a_batch_equals_row_alone(model: ModelDescription) -> None:
    reference, driver = StageDriver(model), StageDriver(model)
    expected = run_alone(reference)
    logits = [driver.prefill({1: OTHERS[1], 0: PROMPT, 2: OTHERS[2], 3: OTHERS[3]})[1:2]]
    for token in CONTINUATION:
        logits.append(driver.decode({3: 9, 2: 11, 0: token, 1: 13})[2:3])
    for step, (ours, theirs) in enumerate(zip(logits, expected, strict=True)):
        assert torch.equal(ours, theirs), f"step {step}"


@pytest.mark.parametrize("rubbish", [math.nan, 1e9])
def test_free_records_and_the_rest_of_a_page_change_nothing(
    model: ModelDescription, rubbish: float
) -> None:
    """Before every step, everything that is not the row's own is overwritten, the null records
    included."""
    reference, driver = StageDriver(model), StageDriver(model)
    expected = run_alone(reference)
    driver.fill_what_nobody_owns(rubbish)
    steps = [driver.prefill({0: PROMPT})]
    for token in CONTINUATION:
        driver.fill_what_nobody_owns(rubbish)
        steps.append(driver.decode({0: token}))
    for step, (ours, theirs) in enumerate(zip(steps, expected, strict=True)):
        assert torch.equal(ours, theirs), f"step {step}"


def test_a_used_slot_and_used_pages_are_as_good_as_new(model: ModelDescription) -> None:
    """A request on memory with another one's leftovers has the same output as on fresh pools."""
    expected = run_alone(StageDriver(model))
    driver = StageDriver(model)
    driver.prefill({0: OTHERS[3]})
    driver.decode({0: 17})
    driver.forget(0)
    for step, (ours, theirs) in enumerate(zip(run_alone(driver), expected, strict=True)):
        assert torch.equal(ours, theirs), f"step {step}"


def test_bfloat16_is_exact_too(checkpoint: CheckpointMaker) -> None:
    model = read_model(checkpoint("qwen3_5_text", dtype=torch.bfloat16))
    reference = StageDriver(model)
    expected = run_alone(reference)
    driver = StageDriver(model, cuts=(1, 3))
    assert_same(driver, run_alone(driver, 64), reference, expected)


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5])
def test_kimi_in_float16_is_close_to_float32(num_tokens: int) -> None:
    """Four heads: rates laid out for the wrong axis fit four tokens, and no other number."""
    prompt = {0: list(range(5, 5 + num_tokens))}
    half, single = (
        StageDriver(tiny(KIMI_LINEAR, dtype)).prefill(prompt)[0].float()
        for dtype in ("float16", "float32")
    )
    assert (half - single).abs().max() < 0.05
