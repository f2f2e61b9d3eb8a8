"""Compatibility of two pools, as a digest and as text for people, and of the stages of one pool."""

import hashlib
from collections.abc import Iterable, Mapping
from itertools import groupby

from engine.memory.layout import CacheKind, CacheSpec, travelling
from runtime.digests import Compatibility, pairing_digest
from runtime.errors import IncompatiblePeerError

SCHEMA_VERSION = 8
"""Must be increased with every change of the copy plan, the tags, the trailer or the
authenticators.
"""


def compatibility(
    *,
    revision: str,
    specs: Iterable[CacheSpec],
    page_size: int,
    numerics: str = "exact",
    weights: str = "model",
    arithmetic: str = "any",
    max_context: str = "the model's",
    draft_revision: str = "",
    config: str = "",
    tensors: str = "",
) -> Compatibility:
    """Return the compatibility of a pool: the meaning of its bytes.

    `revision` is the digest of the model; `config` and `tensors` are its two parts, to be shown.
    `specs` covers the whole model; caches that are not handed over are not compared. `weights` is
    how they are stored (`--weights`). `arithmetic` names the kernels and the instruction set on
    which bits depend, if bits are guaranteed. `max_context` is the limit that an operator set: if
    one pool accepts a request, every compatible pool must be able to continue it.
    """
    ordered = sorted(travelling(specs), key=lambda spec: (spec.layer_id, spec.kind))
    model = [spec for spec in ordered if not spec.of_draft]
    draft = [spec for spec in ordered if spec.of_draft]
    header = [
        f"schema={SCHEMA_VERSION}",
        f"revision={revision}",
        f"numerics={numerics}",
        f"arithmetic={arithmetic}",
        f"page_size={page_size}",
        f"max_context={max_context}",
        f"kept={weights}",
    ]
    digest = pairing_digest(
        _digest([*header, *_lines(model)]),
        _digest([draft_revision, *_lines(draft)]) if draft else "",
    )
    text = (
        f"schema {SCHEMA_VERSION}, config {config[:12] or 'unknown'}, weights {(tensors or revision)[:12]}, "
        f"kept as {weights}, numerics {numerics}, arithmetic {arithmetic}, "
        f"page size {page_size}, max context {max_context}, "
        f"{_describe(model)}"
    )
    return Compatibility(
        digest, f"{text}, draft {draft_revision[:12]}, {_describe_draft(draft)}" if draft else text
    )


def check_settings(mine: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Check that two stages of one pool have the same settings.

    Raises IncompatiblePeerError naming each setting that differs, and both values. An empty value
    matches any value.
    """
    pairs = [
        (name, mine.get(name, "not set"), theirs.get(name, "not set"))
        for name in sorted(mine.keys() | theirs)
    ]
    differing = [
        f"{name} is {here} here, {there} there"
        for name, here, there in pairs
        if here != there and here and there
    ]
    if differing:
        raise IncompatiblePeerError(f"the stages differ: {'; '.join(differing)}")


def _lines(specs: Iterable[CacheSpec]) -> list[str]:
    return [f"{spec.layer_id}:{spec.kind}:{spec.record_shape}:{spec.dtype}" for spec in specs]


def _digest(lines: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def _describe(specs: list[CacheSpec]) -> str:
    """Return a description with one entry for layers with equal caches.

    Example: "layers 0-2,4-6: conv (3, 256) bfloat16 + state (4, 32, 32) float32".
    """
    layers_by_cache: dict[str, list[int]] = {}
    for layer_id, group in groupby(specs, key=lambda spec: spec.layer_id):
        cache = " + ".join(f"{spec.kind} {spec.record_shape} {spec.dtype}" for spec in group)
        layers_by_cache.setdefault(cache, []).append(layer_id)
    return "; ".join(
        f"layers {_ranges(layers)}: {cache}" for cache, layers in layers_by_cache.items()
    )


def _describe_draft(specs: list[CacheSpec]) -> str:
    """Return a description with the setting that determines the shape of the draft's first level."""
    topk = next(
        (f"spec topk {spec.record_shape[0]}, " for spec in specs if spec.kind is CacheKind.TOPK_P),
        "",
    )
    return f"{topk}its {_describe(specs)}"


def _ranges(ids: list[int]) -> str:
    """Return [0, 1, 2, 4] as "0-2,4"."""
    parts: list[str] = []
    for _, group in groupby(enumerate(ids), key=lambda pair: pair[1] - pair[0]):
        run = [layer_id for _, layer_id in group]
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ",".join(parts)
