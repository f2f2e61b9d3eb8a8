"""S2-9: a config that lost fields gets them back from the raw file, and nothing else changes."""

from typing import Any

import pytest

from models.restore import restore_lost_fields

RAW: dict[str, Any] = {"architectures": ["GlmMoeDsaForCausalLM"], "head_dim": 192, "qk_rope_head_dim": 64,
                       "qk_nope_head_dim": 192, "index_topk_freq": 4, "index_skip_topk_offset": 3}
LOSSY: dict[str, Any] = {"architectures": ["GlmMoeDsaForCausalLM"], "head_dim": 192, "qk_rope_head_dim": 192,
                         "qk_nope_head_dim": 192, "qk_head_dim": 384, "hidden_size": 6144}
RESTORED = LOSSY | {"qk_rope_head_dim": 64, "qk_head_dim": 256, "index_topk_freq": 4, "index_skip_topk_offset": 3}


def test_lost_fields_come_back_and_the_head_is_recomputed_s2_9() -> None:
    assert restore_lost_fields(LOSSY, RAW) == RESTORED


def test_repairing_twice_changes_nothing_s2_9() -> None:
    assert restore_lost_fields(restore_lost_fields(LOSSY, RAW), RAW) == RESTORED


def test_fields_the_raw_file_lacks_stay_s2_9() -> None:
    raw = {"architectures": ["GlmMoeDsaForCausalLM"]}
    assert restore_lost_fields(LOSSY, raw) == LOSSY
    assert restore_lost_fields({"vocab_size": 3}, raw) == {"vocab_size": 3}


@pytest.mark.parametrize("architectures", [["DeepseekV32ForCausalLM"], ["LlamaForCausalLM"], None])
def test_other_architectures_stay_s2_9(architectures: list[str] | None) -> None:
    assert restore_lost_fields(LOSSY, RAW | {"architectures": architectures}) == LOSSY


def test_a_nested_text_config_is_repaired_in_place_s2_9() -> None:
    inner = {name: value for name, value in RAW.items() if name != "architectures"}
    raw = {"architectures": RAW["architectures"], "text_config": inner, "vision_config": {"depth": 1}}
    parsed = {"text_config": LOSSY, "vision_config": {"depth": 1}}
    assert restore_lost_fields(parsed, raw) == {"text_config": RESTORED, "vision_config": {"depth": 1}}
