"""Layers that compute their choice of keys: every form of the config, and every error."""

import json
from typing import Any

import pytest

from engine.core.layer_range import get_pp_indices
from engine.memory.layout import CacheKind
from models.blocks.config import RawConfig
from models.blocks.mla import MlaSpec
from models.index_sharing import computing_layers
from models.loader import ModelDescription, random_model
from runtime.errors import ConfigError
from tests.models.conftest import CheckpointMaker


def computing(num_layers: int, **fields: object) -> list[int]:
    return [
        layer_id
        for layer_id, own in enumerate(computing_layers(RawConfig(fields), num_layers))
        if own
    ]


def test_computing_layers_by_frequency_and_offset_s2_1() -> None:
    assert computing(12, index_topk_freq=4, index_skip_topk_offset=3) == [0, 1, 2, 6, 10]
    assert computing(12, index_topk_freq=4) == [0, 1, 5, 9]
    assert computing(7) == list(range(7))


@pytest.mark.parametrize("frequency", range(1, 6))
@pytest.mark.parametrize("offset", [None, 1, 2, 3, 5])
def test_computing_layers_follow_the_rule_s2_1_s2_4(frequency: int, offset: int | None) -> None:
    fields = {"index_topk_freq": frequency} | (
        {} if offset is None else {"index_skip_topk_offset": offset}
    )
    start = 2 if offset is None else offset
    expected = [layer_id for layer_id in range(40) if max(layer_id - start + 1, 0) % frequency == 0]
    assert computing(40, **fields) == expected
    assert expected[0] == 0


def test_precedence_is_types_then_pattern_then_offset() -> None:
    types = {"indexer_types": ["full", "shared", "shared", "full"]}
    pattern = {"index_topk_pattern": "FSFS"}
    frequency = {"index_topk_freq": 2, "index_skip_topk_offset": 1}
    assert computing(4, **types, **pattern, **frequency) == [0, 3]
    assert computing(4, **pattern, **frequency) == [0, 2]
    assert computing(4, index_topk_pattern=["full", "full", "shared", "full"]) == [0, 1, 3]
    assert computing(4, **frequency) == [0, 2]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"index_skip_topk_offset": 0}, "index_skip_topk_offset"),
        ({"index_skip_topk_offset": -1}, "index_skip_topk_offset"),
        ({"index_topk_freq": 0}, "index_topk_freq"),
        ({"index_topk_pattern": "FSXF"}, "index_topk_pattern"),
        ({"index_topk_pattern": "SFFF"}, "index_topk_pattern"),
        ({"index_topk_pattern": "FSS"}, "index_topk_pattern"),
        ({"index_topk_pattern": "FSSFS"}, "index_topk_pattern"),
        ({"index_topk_pattern": 4}, "index_topk_pattern"),
        ({"indexer_types": ["shared", "full", "full", "full"]}, "indexer_types"),
        ({"indexer_types": ["full"]}, "indexer_types"),
        ({"indexer_types": ["full", "none", "full", "full"]}, "indexer_types"),
    ],
)
def test_impossible_sharing_is_refused_at_load_s2_2_s2_3(
    fields: dict[str, object], field: str
) -> None:
    with pytest.raises(ConfigError, match=field) as caught:
        computing(4, **fields)
    assert caught.value.field == field


@pytest.fixture
def glm_config(checkpoint: CheckpointMaker) -> dict[str, Any]:
    """Return a config without fields that transformers derived, as in a published file."""
    config: dict[str, Any] = json.loads((checkpoint("glm_moe_dsa") / "config.json").read_text())
    for name in ("indexer_types", "mlp_layer_types", "layer_types", "qk_head_dim"):
        config.pop(name, None)
    return config


def mixers(model: ModelDescription) -> list[MlaSpec]:
    found = [layer.mixer for layer in model.spec.layers]
    assert all(isinstance(mixer, MlaSpec) for mixer in found)
    return [mixer for mixer in found if isinstance(mixer, MlaSpec)]


def test_head_dim_does_not_replace_the_rope_part(glm_config: dict[str, Any]) -> None:
    """Published files have head_dim 192 and qk_rope_head_dim 64; one must not overwrite the
    other."""
    model = random_model(
        glm_config
        | {"head_dim": 192, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "index_head_dim": 128}
    )
    mixer = mixers(model)[0]
    assert model.spec.rope is not None
    assert (mixer.rope_dim, mixer.nope_dim, model.spec.rope.dim) == (64, 192, 64)
    assert mixer.scale == pytest.approx(256**-0.5)


def test_only_computing_layers_keep_index_keys_s2_10(glm_config: dict[str, Any]) -> None:
    model = random_model(glm_config | {"index_topk_freq": 2, "index_skip_topk_offset": 3})
    specs = model.cache_specs(16)
    assert [spec.layer_id for spec in specs if spec.kind is CacheKind.LATENT] == list(range(6))
    assert [spec.layer_id for spec in specs if spec.kind is CacheKind.INDEX_KEY] == [0, 1, 2, 4]
    assert {spec.record_shape for spec in specs} == {(16, 24 + 8), (16, 16)}


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_boundaries_that_hand_selections_on_follow_the_rule_s2_4_s2_5(
    size: int, glm_config: dict[str, Any]
) -> None:
    """78 layers, frequency 4, offset 3: a stage takes a selection iff its first layer shares."""
    model = random_model(
        glm_config | {"num_hidden_layers": 78, "index_topk_freq": 4, "index_skip_topk_offset": 3}
    )
    starts = [get_pp_indices(78, rank, size).start for rank in range(size)]
    takes = [mixers(model)[start].shares_selection for start in starts]
    assert takes == [max(start - 2, 0) % 4 != 0 for start in starts]
    assert not takes[0]
    if size == 2:
        assert (starts[1], takes[1]) == (39, True)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"index_topk": 0}, "index_topk"),
        ({"index_topk": None}, "index_topk"),
        ({"index_head_dim": 4}, "index_head_dim"),
        ({"q_lora_rank": None}, "q_lora_rank"),
        ({"kv_lora_rank": None}, "kv_lora_rank"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ({"mlp_layer_types": ["dense"] * 5 + ["mystery"]}, "mlp_layer_types"),
    ],
)
def test_bad_field_is_named(change: dict[str, Any], field: str, glm_config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=field):
        random_model(glm_config | change)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("deepseek_v3", {"rope_interleave": False}),
        ("deepseek_v32", {"rope_interleave": False}),
        ("deepseek_v32", {"indexer_rope_interleave": True}),
        ("glm_moe_dsa", {"rope_interleave": False}),
        ("glm_moe_dsa", {"indexer_rope_interleave": False}),
    ],
)
def test_rope_that_turns_other_channels_is_refused(
    name: str, change: dict[str, bool], checkpoint: CheckpointMaker
) -> None:
    config = json.loads((checkpoint(name) / "config.json").read_text())
    random_model(config | {field: not value for field, value in change.items()})
    (field,) = change
    with pytest.raises(ConfigError, match=rf"\b{field}"):
        random_model(config | change)
