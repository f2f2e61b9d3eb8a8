"""Weights in MXFP4, converted to the model's dtype while they are read.

The format is that of the OCP Microscaling specification 1.0: 32 consecutive numbers of a row share
a scale, a power of two with an exponent of eight bits (E8M0), and have four bits each: a sign, two
bits of exponent and one of mantissa (E2M1). Every product is exact in bfloat16.

A stack of matrices [items, out, in] is stored as `_blocks` [items, out, in / 32, 16] and `_scales`
[items, out, in / 32], of bytes. The first number of a pair is in the lower half of its byte.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
import xxhash
from torch import Tensor

from models.checkpoint import Checkpoint, TensorEntry, WeightEntry, transposed
from runtime.errors import ConfigError

_BLOCKS, _SCALES = "_blocks", "_scales"
_BLOCK = 32  # numbers with one scale
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_MAGNITUDES, *(-each for each in _MAGNITUDES))  # by code
_PIECE_NUMBERS = 1 << 20  # numbers of a weight that are expanded to fp32 at a time


@dataclass(frozen=True)
class Mxfp4Format:
    """The format of all stacks in a checkpoint."""

    def dequantized(
        self, tensors: Mapping[str, TensorEntry], inputs_first: tuple[str, ...]
    ) -> Checkpoint:
        """Return the checkpoint of the weights in `tensors`.

        Nothing is read yet. `inputs_first` has suffixes of weights that the family stores as
        [items, in, out] if they are not quantized.

        Raises:
            ConfigError: parts of a weight are missing or do not fit each other.
        """
        entries: dict[str, WeightEntry] = dict(tensors)
        for name in [name for name in tensors if name.endswith((_BLOCKS, _SCALES))]:
            entries.pop(name)
            stem = name.removesuffix(_BLOCKS).removesuffix(_SCALES)
            parts = [tensors.get(stem + ending) for ending in (_BLOCKS, _SCALES)]
            problem = _problem(*parts)
            if problem:
                raise ConfigError(
                    f"quantized weights do not fit their config; {stem}: {problem}",
                    field="quantization_config",
                )
            if name.endswith(_BLOCKS):
                codes, scales = (part for part in parts if part is not None)
                # Families that store [in, out] have it transposed again.
                entry = Mxfp4Entry(codes, replace(scales, dtype="F8_E8M0"))
                entries[stem] = transposed(entry) if stem.endswith(inputs_first) else entry
        return Checkpoint(entries)


def _problem(codes: TensorEntry | None, scales: TensorEntry | None) -> str:
    """Return the mismatch between the parts of a weight, or an empty string."""
    if codes is None or scales is None:
        return f"has no {_SCALES if scales is None else _BLOCKS}"
    if (codes.dtype, scales.dtype) != ("U8", "U8"):
        return f"codes are {codes.dtype} and scales {scales.dtype}, not U8"
    if len(codes.shape) < 3 or codes.shape[-1] != _BLOCK // 2:
        return f"codes of shape {list(codes.shape)} are not blocks of {_BLOCK // 2} bytes"
    if codes.shape[:-1] != scales.shape:
        return f"scales of shape {list(scales.shape)} for codes of {list(codes.shape)}"
    return ""


@dataclass(frozen=True)
class Mxfp4Entry:
    """A `WeightEntry` of codes and scales."""

    codes: TensorEntry
    scales: TensorEntry

    @property
    def shape(self) -> tuple[int, ...]:
        *outer, num_blocks, _ = self.codes.shape
        return (*outer, num_blocks * _BLOCK)

    @property
    def kind(self) -> str:
        return f"mxfp4: {'; '.join(part.kind for part in self.stored)}"

    @property
    def stored(self) -> tuple[TensorEntry, ...]:
        return self.scales, self.codes

    def read(
        self, out: Tensor, hashed: "xxhash.xxh3_128 | None", *, item: int | None = None
    ) -> None:
        """Implement `WeightEntry.read`."""
        target = out.view(-1, out.shape[-1])
        for rows, piece in self._pieces(hashed, item):
            target[rows].copy_(piece)

    def row_scales(self, *, item: int | None = None) -> None:
        """Return None: rows have several scales."""

    def _pieces(
        self, hashed: "xxhash.xxh3_128 | None", item: int | None
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield rows of the weight, or of its entry `item`, in fp32."""
        num_rows = math.prod(self.shape[:-1] if item is None else self.shape[1:-1])
        flat = [
            replace(part, shape=(num_rows, *part.shape[-size:]))
            for part, size in ((self.scales, 1), (self.codes, 2))
        ]
        if item is not None:
            flat = [replace(part, shape=(self.shape[0], *part.shape)) for part in flat]
        scales_entry, codes_entry = flat
        scales = scales_entry.rows(0, num_rows, hashed, item=item).float()
        values = torch.tensor(_VALUES)
        at_once = max(1, _PIECE_NUMBERS // self.shape[-1])
        for start in range(0, num_rows, at_once):
            count = min(at_once, num_rows - start)
            codes = codes_entry.rows(start, count, hashed, item=item).int()
            pairs = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
            piece = values[pairs] * scales[start : start + count, :, None]
            yield slice(start, start + count), piece.flatten(1)
