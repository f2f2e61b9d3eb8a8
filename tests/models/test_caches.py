"""Caches of a model's stages, derived from its config alone."""

from collections import Counter
from typing import Any

import pytest

from engine.core.layer_range import get_pp_indices
from engine.memory.layout import CacheKind, CacheSpec, bytes_per_page, bytes_per_slot
from models.loader import random_model, read_model
from tests.models.blocks.test_config import HYBRID
from tests.models.conftest import CheckpointMaker
from tests.support.models.checkpoints import FAMILY_NAMES
from tests.support.models.single_stage import StageDriver
from tests.support.models.tiny_models import GEMMA3


def stage_specs(config: dict[str, Any], size: int) -> list[list[CacheSpec]]:
    model = random_model(config)
    stages = [get_pp_indices(model.facts.num_layers, rank, size) for rank in range(size)]
    return [
        [spec for spec in model.cache_specs(64) if spec.layer_id in layers] for layers in stages
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_layers_and_bytes_of_hybrid_stages_s4_1(size: int) -> None:
    """60 layers, every fourth with full attention."""
    stages = stage_specs(HYBRID | {"num_hidden_layers": 60}, size)
    counts = [Counter(spec.kind for spec in specs) for specs in stages]
    ranges = [get_pp_indices(60, rank, size) for rank in range(size)]
    for layers, found in zip(ranges, counts, strict=True):
        num_full = sum(layer_id % 4 == 3 for layer_id in layers)
        assert found == Counter(
            {
                CacheKind.KV: num_full,
                CacheKind.STATE: len(layers) - num_full,
                CacheKind.CONV: len(layers) - num_full,
            }
        )
    if size == 2:
        assert [found[CacheKind.KV] for found in counts] == [7, 8]
        assert [found[CacheKind.STATE] for found in counts] == [23, 22]
    whole = stage_specs(HYBRID | {"num_hidden_layers": 60}, 1)[0]
    assert sum(bytes_per_page(specs) for specs in stages) == bytes_per_page(whole)
    assert sum(bytes_per_slot(specs) for specs in stages) == bytes_per_slot(whole)
    state_bytes = 32 * 128 * 128 * 4 + 3 * (2 * 16 * 128 + 32 * 128) * 2
    assert bytes_per_slot(whole) == 45 * state_bytes
    assert bytes_per_page(whole) == 15 * 2 * 2 * 64 * 32 * 2


def test_layers_with_windows_cost_nothing_per_token() -> None:
    """Five layers, the third of which sees everything; the windows of the others are on three
    pages."""
    specs = random_model({**GEMMA3, "torch_dtype": "bfloat16"}).cache_specs(16)
    assert [spec.kind for spec in specs] == [CacheKind.WINDOW, CacheKind.WINDOW, CacheKind.KV] + [
        CacheKind.WINDOW
    ] * 2
    page_bytes = 2 * 2 * 16 * 32 * 2  # k and v, 2 kv heads of 32
    assert (bytes_per_page(specs), bytes_per_slot(specs)) == (page_bytes, 4 * 3 * page_bytes)


def test_stages_without_attention_and_without_recurrence_run_s4_3(
    checkpoint: CheckpointMaker,
) -> None:
    """Four layers on four stages: three have only recurrent layers, the last only attention."""
    model = read_model(checkpoint("qwen3_5_text"))
    driver = StageDriver(model, cuts=(1, 2, 3))
    kinds = [
        {spec.kind for spec in model.cache_specs(16) if spec.layer_id in stage.layer_range}
        for stage in driver.stages
    ]
    assert kinds == [{CacheKind.CONV, CacheKind.STATE}] * 3 + [{CacheKind.KV}]
    assert driver.prefill({0: [5, 6, 7]}).isfinite().all()


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_every_layer_of_every_family_declares_its_cache(
    name: str, checkpoint: CheckpointMaker
) -> None:
    model = read_model(checkpoint(name))
    specs = model.cache_specs(16)
    assert {spec.layer_id for spec in specs} == set(range(model.facts.num_layers))
    assert len({(spec.layer_id, spec.kind) for spec in specs}) == len(specs)
    is_latent = any(spec.kind is CacheKind.LATENT for spec in specs)
    assert (model.latent_geometry(16) is not None) == is_latent
    assert (model.attention_geometry(16) is not None) != is_latent
