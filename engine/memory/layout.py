"""What a layer keeps per token or per request, as plain numbers. No torch: the transfer plane reads this too.

A *record* is the unit that moves: the bytes of one page (paged kinds) or one slot (slot kinds) of one layer. Records
with consecutive indices are adjacent in memory, so a run of pages is one stretch of bytes.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from engine.core.layer_range import LayerRange

NULL_INDEX = 0  # the record of every pool that is never leased: target of padded table entries and of padded rows


class CacheKind(StrEnum):
    """What is cached. The value is the name on the wire, in digests, metrics and errors."""

    KV = "kv"  # paged: [2 (k, v), num_kv_heads, page_size, head_dim] per page
    CONV = "conv"  # slot: [conv_kernel - 1, channels], raw inputs, oldest first
    STATE = "state"  # slot: [num_v_heads, head_k_dim, head_v_dim], fp32
    LATENT = "latent"  # paged: [page_size, kv_lora_rank + qk_rope_head_dim] (MLA)
    INDEX_KEY = "index_key"  # paged: [page_size, index_head_dim] (DSA)
    TOPK_P = "topk_p"  # slot: [topk] fp32, a draft's first level after the prompt, as natural logarithms
    TOPK_INDEX = "topk_index"  # slot: [topk] int64, its tokens
    DRAFT_HIDDEN = "draft_hidden"  # slot: [draft width], the draft's own hidden state at the prompt's end
    DRAFT_KEYS = "draft_keys"  # slot: [keys] int32, what the steps of its first round attend to (DSA), filled with -1

    @property
    def is_paged(self) -> bool:
        return self in (CacheKind.KV, CacheKind.LATENT, CacheKind.INDEX_KEY)

    @property
    def is_recurrent(self) -> bool:
        """What a row reads of all tokens before it: a prompt goes on only where it was kept."""
        return self in (CacheKind.CONV, CacheKind.STATE)


class Buffer(Protocol):
    """Contiguous memory that moves as one stretch: a memoryview of host bytes, or bytes of a device, which the host
    cannot read."""

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class CacheSpec:
    """One cached tensor of one layer. `record_shape` is the shape of one page or slot, `dtype` torch's name for it.

    A spec that does not travel is memory that is never read, kept so that all layers of a pool look alike: index keys
    of a layer that shares its selection. It is no part of a handoff, so pools with it and pools without it fit
    together. What is of a draft travels only between pools that both have it.
    """

    layer_id: int
    kind: CacheKind
    record_shape: tuple[int, ...]
    dtype: str  # "bfloat16", "float32", "float16", "int64", "int32"
    item_bytes: int  # of one element
    travels: bool = True
    of_draft: bool = False

    @property
    def record_bytes(self) -> int:
        return math.prod(self.record_shape) * self.item_bytes


@dataclass(frozen=True)
class PoolGeometry:
    """Everything a stage caches. `specs` covers the whole model; a stage keeps those of its `layers`."""

    page_size: int
    num_pages: int
    num_slots: int
    layers: LayerRange
    specs: tuple[CacheSpec, ...]

    def local_specs(self) -> tuple[CacheSpec, ...]:
        return tuple(spec for spec in self.specs if spec.layer_id in self.layers)


def travelling(specs: Iterable[CacheSpec], *, with_draft: bool = True) -> tuple[CacheSpec, ...]:
    """What both sides of a handoff must have alike, and what moves; of a draft only where both have it."""
    return tuple(spec for spec in specs if spec.travels and (with_draft or not spec.of_draft))


def bytes_per_page(specs: Iterable[CacheSpec]) -> int:
    return sum(spec.record_bytes for spec in specs if spec.kind.is_paged)


def bytes_per_slot(specs: Iterable[CacheSpec]) -> int:
    return sum(spec.record_bytes for spec in specs if not spec.kind.is_paged)
