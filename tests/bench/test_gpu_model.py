"""Every part of the whole-model benchmark, over a tiny model on the device's backends without a
device."""

import time
from collections.abc import Callable

import pytest
import torch

from bench.gpu import Ceilings
from bench.gpu_configs import HYBRID_9B, LLAMA_8B
from bench.gpu_model import PAGE, DeviceRandom, Sizes, build, measure, reference
from bench.report import Value
from engine.core.layer_range import LayerRange
from engine.core.numerics import Numerics
from models.blocks.weights import Weights
from models.decoder import DecoderStage
from models.loader import random_model
from tests.support.device.device_stack import device_backends

TINY: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 4,
}
TINY_HYBRID = {
    **HYBRID_9B,
    **TINY,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
SIZES = Sizes(rows=(1, 2), contexts=(PAGE, 2 * PAGE), prompts=(70,), nodes=(3, 5))
LIMITS = Ceilings(copy_bps=1e9, matmul_flops=1e9)


def once(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


@pytest.mark.parametrize("config", [{**LLAMA_8B, **TINY}, TINY_HYBRID])
@pytest.mark.long
def test_every_case_is_measured(config: dict[str, object]) -> None:
    told = list[dict[str, Value]]()
    measure(config, device_backends(), LIMITS, SIZES, once, told.append)
    assert [values.pop("part") for values in told] == [
        "weights",
        "decode",
        "prefill",
        "verify",
        "transformers",
    ]
    values = {name: value for part in told[:-1] for name, value in part.items()}
    assert isinstance(values.pop("num_pages"), int)
    cases = [f"decode_b{rows}_c{context}" for context in SIZES.contexts for rows in SIZES.rows]
    assert set(values) == {
        "weight_gb",
        *(f"{case}_{what}" for case in cases for what in ("ms", "of_copy")),
        "prefill_70_ms",
        "prefill_70_of_matmul",
        "verify_3_of_step",
        "verify_5_of_step",
    }
    assert all(isinstance(value, float) and value > 0 for value in values.values())


@pytest.mark.long
def test_a_part_that_fails_leaves_the_others() -> None:
    def fails_for_prompts(run: Callable[[], object]) -> float:
        if len(told) == 2:
            raise torch.OutOfMemoryError("no memory")
        return once(run)

    told = list[dict[str, Value]]()
    measure({**LLAMA_8B, **TINY}, device_backends(), LIMITS, SIZES, fails_for_prompts, told.append)
    assert told[2] == {"part": "prefill", "error": "OutOfMemoryError: no memory"}
    assert "verify_5_of_step" in told[3]
    told.clear()
    measure(
        {**LLAMA_8B, **TINY, "num_hidden_layers": "four"},
        device_backends(),
        LIMITS,
        SIZES,
        once,
        told.append,
    )
    assert [(values["part"], "error" in values) for values in told] == [
        ("weights", True),
        ("transformers", True),
    ]


def test_bytes_and_products_are_counted() -> None:
    """By hand: a layer of 64 wide, 4 and 2 heads of 16, 96 wide inside; 4 layers, a head of 256
    tokens, norms."""
    subject = build({**LLAMA_8B, **TINY}, device_backends(), SIZES)
    layer = 64 * (4 + 2 + 2) * 16 + 64 * 64 + 3 * 64 * 96 + 2 * 64
    assert subject.weight_bytes == 2 * (4 * layer + 64 + 256 * 64)
    assert subject.cache_bytes(2 * PAGE) == 4 * 2 * PAGE * 2 * 2 * 16 * 2
    assert subject.prefill_flops(10) == 2 * 10 * (4 * layer + 64) + 2 * 4 * 16 * 100 * 4


def test_the_shapes_are_those_of_8_and_9_billion_weights() -> None:
    assert num_weights(LLAMA_8B) == pytest.approx(8.03e9, rel=0.01)  # as published
    assert num_weights(HYBRID_9B) == pytest.approx(9e9, rel=0.06)


def num_weights(config: dict[str, object]) -> int:
    """Return the number of elements of all tensors without allocating them."""

    class Counted(DeviceRandom):
        total = 0

        def read(
            self, name: str, out: torch.Tensor, *, item: tuple[int, int] | None = None
        ) -> None:
            self.total += out.numel()

    description, source = random_model(config), Counted()
    weights = Weights(
        source, prefix="", dtype=torch.bfloat16, numerics=Numerics.FAST, device=torch.device("meta")
    )
    DecoderStage(
        facts=description.facts,
        spec=description.spec,
        layer_range=LayerRange(0, 32),
        weights=weights,
    )
    return source.total


def test_transformers_decodes_for_comparison() -> None:
    assert reference({**LLAMA_8B, **TINY}, torch.device("cpu"), SIZES, once)[
        "transformers_b1_c64_ms"
    ]
