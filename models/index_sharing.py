"""The layers that compute a selection of keys, and the layers that share it (cross-layer DSA).

A config specifies this in one of four ways. The first one present applies:

    indexer_types            "full" or "shared" per layer
    index_topk_pattern       the same as a list, or as a string of F and S
    index_skip_topk_offset   with index_topk_freq: layer l computes iff max(l - offset + 1, 0) is a
                             multiple of freq
    neither                  the same with offset 2
"""

from models.blocks.config import RawConfig

_LETTERS = {"F": "full", "S": "shared"}
_DEFAULT_OFFSET = 2


def computing_layers(raw: RawConfig, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it computes the selection.

    Raises:
        ConfigError: offset or frequency below 1, an unknown kind, a wrong length, or a layer 0 that
            shares, although no layer precedes it.
    """
    field = next((name for name in ("indexer_types", "index_topk_pattern") if name in raw), None)
    if field is None:
        frequency = raw.integer("index_topk_freq", 1)
        offset = raw.integer("index_skip_topk_offset", _DEFAULT_OFFSET)
        return tuple(
            max(layer_id - offset + 1, 0) % frequency == 0 for layer_id in range(num_layers)
        )
    kinds = _kinds(raw, field)
    unknown = sorted(set(kinds) - set(_LETTERS.values()))
    if unknown:
        raise raw.fail(field, f"names {unknown}, only 'full' (F) and 'shared' (S) are known")
    if len(kinds) != num_layers:
        raise raw.fail(field, f"names {len(kinds)} layers, num_hidden_layers is {num_layers}")
    if kinds[0] == "shared":
        raise raw.fail(field, "makes layer 0 share, but no layer precedes it")
    return tuple(kind == "full" for kind in kinds)


def _kinds(raw: RawConfig, field: str) -> tuple[str, ...]:
    if field == "index_topk_pattern" and isinstance(raw.as_dict()[field], str):
        return tuple(_LETTERS.get(letter, letter) for letter in raw.text(field))
    return raw.texts(field)
