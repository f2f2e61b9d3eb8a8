"""Repairs a config that went through another library on its way here.

Some readers of config.json write `head_dim` over `qk_rope_head_dim`, or drop how GLM-5 shares its selected keys. Baton
reads the file itself, so this waits for its caller: one who holds such a reader's result and the folder it came from.
"""

from collections.abc import Mapping

_ARCHITECTURE = "GlmMoeDsaForCausalLM"
_FIELDS = ("qk_rope_head_dim", "index_topk_freq", "index_topk_pattern", "index_skip_topk_offset", "indexer_types")


def restore_lost_fields(parsed: Mapping[str, object], raw: Mapping[str, object]) -> dict[str, object]:
    """`parsed` with the fields above as `raw` (the content of config.json) has them, and `qk_head_dim` to match.

    Fields that the raw file does not have, and other architectures, are left alone; repairing twice changes nothing.
    A nested `text_config` is repaired where the raw file nests it too.
    """
    nested, raw_nested = parsed.get("text_config"), raw.get("text_config")
    if isinstance(nested, Mapping) and isinstance(raw_nested, Mapping):
        inner = {"architectures": raw.get("architectures")} | dict(raw_nested)
        return {**parsed, "text_config": restore_lost_fields(nested, inner)}
    if raw.get("architectures") != [_ARCHITECTURE]:
        return dict(parsed)
    restored = {**parsed, **{name: raw[name] for name in _FIELDS if name in raw}}
    nope, rope = restored.get("qk_nope_head_dim"), restored.get("qk_rope_head_dim")
    if isinstance(nope, int) and isinstance(rope, int):
        restored["qk_head_dim"] = nope + rope
    return restored
