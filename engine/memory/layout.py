"""Layout of cached data per token and per request, as plain numbers.

The module does not import torch, because the transfer plane reads it too.

A *record* is the unit of transfer: the bytes of one page (paged kinds) or one slot (slot kinds) of
one layer. Records with consecutive indices are adjacent in memory, so consecutive pages are one
stretch of bytes.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple, Protocol

from engine.core.layer_range import ONLY_RANK, LayerRange, Part, TensorRank

# record of every pool that is never leased; padded table entries and padded rows use it
NULL_INDEX = 0


class CacheKind(StrEnum):
    """The kind of cached data.

    The value is the name on the wire and in digests, metrics and errors.
    """

    KV = "kv"  # paged: [2 (k, v), num_kv_heads, page_size, head_dim] per page
    CONV = "conv"  # slot: [conv_kernel - 1, channels], raw inputs, oldest first
    STATE = "state"  # slot: [num_v_heads, head_k_dim, head_v_dim], fp32
    # slot: [pages, 2 (k, v), num_kv_heads, page_size, head_dim], a ring of the row's latest pages
    WINDOW = "window"
    LATENT = "latent"  # paged: [page_size, kv_lora_rank + qk_rope_head_dim] (MLA)
    INDEX_KEY = "index_key"  # paged: [page_size, index_head_dim] (DSA)
    # slot: [topk] fp32, the first level of a draft after the prompt, as natural logarithms
    TOPK_P = "topk_p"
    TOPK_INDEX = "topk_index"  # slot: [topk] int64, the tokens of that level
    # slot: [draft width], the draft's own hidden state at the prompt's end
    DRAFT_HIDDEN = "draft_hidden"
    # slot: [keys] int32, keys that the first round attends to (DSA), padded with -1
    DRAFT_KEYS = "draft_keys"

    @property
    def is_paged(self) -> bool:
        return self in (CacheKind.KV, CacheKind.LATENT, CacheKind.INDEX_KEY)

    @property
    def is_state(self) -> bool:
        """Return whether a row overwrites this data as it advances.

        A prompt can then be resumed only at positions whose state was kept.
        """
        return self in (CacheKind.CONV, CacheKind.STATE, CacheKind.WINDOW)

    @property
    def is_kept(self) -> bool:
        """Return whether prefix caches keep this data for later prompts."""
        return self.is_paged or self.is_state


class Buffer(Protocol):
    """Contiguous memory that moves as one stretch.

    It is a memoryview of host bytes, or bytes of a device, which the host cannot read.
    """

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class CacheSpec:
    """One cached tensor of one layer.

    A spec that does not travel describes memory that is never read: index keys of a layer that
    shares its selection. It exists so that all layers of a pool have the same form. It is not part
    of a handoff, so pools with it and without it are compatible. Tensors of a draft travel only
    between pools that both have the draft; they belong to the first rank.

    Ranks of a stage divide a record along `split_axis`; if it is None, each has the whole record.
    The axis consists of `blocks` (their lengths), each of which is divided separately: heads, or a
    convolution's channels of q, k and v. Each block consists of `num_units` equal units, which stay
    whole.

    Attributes:
        record_shape: the shape of one page or slot.
        dtype: torch's name of the element type.
        num_units: the number of units of each block; 0 if every element is a unit.
        may_repeat: consecutive ranks share a part if there are fewer parts than ranks.
    """

    layer_id: int
    kind: CacheKind
    record_shape: tuple[int, ...]
    dtype: str  # "bfloat16", "float32", "float16", "int64", "int32"
    item_bytes: int  # bytes of one element
    travels: bool = True
    of_draft: bool = False
    split_axis: int | None = None
    blocks: tuple[int, ...] = ()
    num_units: int = 0
    may_repeat: bool = False

    @property
    def record_bytes(self) -> int:
        return math.prod(self.record_shape) * self.item_bytes

    def parts(self, rank: TensorRank) -> tuple[Part, ...]:
        """Return the rank's part of each block."""
        divide = rank.shared_part if self.may_repeat else rank.part
        found = list[Part]()
        for length in self.blocks:
            num_units = self.num_units or length
            units = divide(num_units, f"{self.kind} of layer {self.layer_id}")
            found.append(units.times(length // num_units))
        return tuple(found)

    def of_rank(self, rank: TensorRank) -> "CacheSpec":
        """Return the spec of one rank's part."""
        if self.split_axis is None or rank.size == 1:
            return self
        shape = list(self.record_shape)
        parts = self.parts(rank)
        shape[self.split_axis] = sum(map(len, parts))
        return replace(
            self,
            record_shape=tuple(shape),
            blocks=tuple(map(len, parts)),
            num_units=self.num_units * len(parts[0]) // self.blocks[0],
        )


@dataclass(frozen=True)
class PoolGeometry:
    """The caches of a stage.

    `specs` covers the whole model. A stage keeps the specs of its `layers`, and a rank its parts of
    them.
    """

    page_size: int
    num_pages: int
    num_slots: int
    layers: LayerRange
    specs: tuple[CacheSpec, ...]
    tensor: TensorRank = ONLY_RANK  # the rank among those that share requests

    def local_specs(self) -> tuple[CacheSpec, ...]:
        return tuple(
            spec.of_rank(self.tensor)
            for spec in self.specs
            if spec.layer_id in self.layers and not (spec.of_draft and self.tensor.rank)
        )


class Stretch(NamedTuple):
    """Bytes of one record that move together, with their offsets in source and destination."""

    source_start: int
    dest_start: int
    num_bytes: int


def stretches(spec: CacheSpec, source: TensorRank, dest: TensorRank) -> tuple[Stretch, ...] | None:
    """Return the stretches of each record that a source rank sends to a destination rank.

    They are in the order of the source's bytes; None means the whole record. Each byte has one
    writer. Of several source ranks with the same bytes, it is the first one from the source rank on
    that is opposite of the destination's.
    """
    if spec.of_draft:
        return None if source.rank == dest.rank == 0 else ()
    if source.size == dest.size:
        return None if source.rank == dest.rank else ()
    if spec.split_axis is None:
        return None if source.rank == _opposite(source, dest) else ()
    return _common_stretches(spec, source, dest)


def _opposite(source: TensorRank, dest: TensorRank) -> int:
    """Return the source rank at the place of a destination rank."""
    return dest.rank * source.size // dest.size


@lru_cache(maxsize=1 << 14)  # a handoff needs those of all layers and ranks several times
def _common_stretches(
    spec: CacheSpec, source: TensorRank, dest: TensorRank
) -> tuple[Stretch, ...] | None:
    """Return the stretches of a divided record that both ranks have, as `stretches` does."""
    assert spec.split_axis is not None, "checked before"
    own = spec.parts(source)
    wanted = spec.parts(dest)
    if not any(
        given.start < taken.stop and taken.start < given.stop
        for given, taken in zip(own, wanted, strict=True)
    ):
        return ()
    if spec.may_repeat:
        same = [rank.rank for rank in source.every if spec.parts(rank) == own]
        first = _opposite(source, dest)
        if source.rank != next((rank for rank in same if rank >= first), same[-1]):
            return ()
    if own == wanted:
        return None
    inner = math.prod(spec.record_shape[spec.split_axis + 1 :]) * spec.item_bytes
    found = list[Stretch]()
    source_at = 0
    dest_at = 0
    for _ in range(math.prod(spec.record_shape[: spec.split_axis])):
        for given, taken in zip(own, wanted, strict=True):
            start = max(given.start, taken.start)
            stop = min(given.stop, taken.stop)
            if start < stop:
                found.append(
                    Stretch(
                        (source_at + start - given.start) * inner,
                        (dest_at + start - taken.start) * inner,
                        (stop - start) * inner,
                    )
                )
            source_at = source_at + len(given)
            dest_at = dest_at + len(taken)
    return tuple(found)


def travelling(specs: Iterable[CacheSpec], *, with_draft: bool = True) -> tuple[CacheSpec, ...]:
    """Return the specs that are transferred and must be equal on both sides of a handoff.

    Draft specs are included only if both sides have the draft.
    """
    return tuple(spec for spec in specs if spec.travels and (with_draft or not spec.of_draft))


def bytes_per_page(specs: Iterable[CacheSpec]) -> int:
    return sum(spec.record_bytes for spec in specs if spec.kind.is_paged)


def bytes_per_slot(specs: Iterable[CacheSpec]) -> int:
    return sum(spec.record_bytes for spec in specs if not spec.kind.is_paged)
