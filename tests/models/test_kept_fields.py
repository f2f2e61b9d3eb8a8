"""S2-9: the pinned transformers reads and writes GLM-5's fields of heads and shared keys without a
loss.

Earlier readers wrote `head_dim` over `qk_rope_head_dim`, or dropped how layers share selected keys.
Baton reads config.json itself, so nothing has to be restored; what transformers saved again, and
the oracle of other tests, depend on this.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, GlmMoeDsaConfig

from models.loader import random_model
from tests.support.models.tiny_models import GLM_DSA

HEADS = ("qk_rope_head_dim", "qk_nope_head_dim")
SHARING = ("index_topk_freq", "index_skip_topk_offset", "index_topk_pattern", "indexer_types")
BY_RULE: dict[str, object] = {
    **{name: value for name, value in GLM_DSA.items() if name not in SHARING},
    "num_hidden_layers": 8,
    "head_dim": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
}
VARIANTS: list[dict[str, object]] = [
    BY_RULE | {"index_topk_freq": 4, "index_skip_topk_offset": 3},
    BY_RULE | {"index_topk_freq": 4, "index_skip_topk_offset": 3, "index_topk_pattern": "FFFSSSFS"},
    BY_RULE | {"indexer_types": ["full"] * 3 + ["shared"] * 5},
]


def lost_fields(raw: Mapping[str, object], read: Mapping[str, object]) -> list[str]:
    """Return the names of fields of `raw` that `read` lacks or changes."""
    return [name for name in (*HEADS, *SHARING) if name in raw and read.get(name) != raw[name]]


def written(folder: Path, raw: Mapping[str, object]) -> Path:
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


@pytest.mark.parametrize("raw", VARIANTS)
def test_nothing_is_lost_in_transformers_s2_9(raw: dict[str, object], tmp_path: Path) -> None:
    config: Any = AutoConfig.from_pretrained(written(tmp_path, raw))
    assert lost_fields(raw, config.to_dict()) == []
    assert config.qk_head_dim == 16 + 8


@pytest.mark.parametrize("raw", VARIANTS)
def test_a_model_saved_again_by_transformers_is_the_same_s2_9(
    raw: dict[str, object], tmp_path: Path
) -> None:
    config: Any = AutoConfig.from_pretrained(written(tmp_path, raw))
    config.save_pretrained(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    assert random_model(again).spec == random_model(raw).spec


def test_a_reader_that_loses_them_is_found_out_s2_9(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One attribute for both widths, and no field for the rule."""

    def forgetful(self: GlmMoeDsaConfig, **fields: object) -> None:
        parent: Any = super(GlmMoeDsaConfig, self)
        parent.__post_init__(
            **{name: value for name, value in fields.items() if name not in SHARING}
        )

    monkeypatch.setattr(GlmMoeDsaConfig, "attribute_map", {"qk_rope_head_dim": "head_dim"})
    monkeypatch.setattr(GlmMoeDsaConfig, "__post_init__", forgetful)
    config: Any = AutoConfig.from_pretrained(written(tmp_path, VARIANTS[0]))
    assert lost_fields(VARIANTS[0], config.to_dict()) == [
        "qk_rope_head_dim",
        "index_topk_freq",
        "index_skip_topk_offset",
    ]
