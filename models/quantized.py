"""Weights of quantized checkpoints, converted to the model's dtype while they are read.

A weight w [out, in] is stored as codes of 4 or 8 bits. Each block of it has a scale and possibly a
zero point:

    w[r, c] = (code[r, c] - zero[b(r), b(c)]) * scale[b(r), b(c)]

This is computed in fp32 and rounded once. In fp32 both operations are exact for codes of up to 8
bits and scales of 16 bits. The format (`quantized_formats`) defines the tensors of the parts and
the packing of codes. A weight is read in pieces of a few MiB, so the memory needed in addition to
the result does not grow with the weight.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
import xxhash
from torch import Tensor

from models.checkpoint import Checkpoint, TensorEntry, WeightEntry
from runtime.errors import ConfigError

_PIECE_NUMBERS = 1 << 20  # numbers of a weight that are expanded to fp32 at a time
_WORD_BITS = 32
_SCALES = ("F32", "BF16", "F16", "F8_E8M0")


@dataclass(frozen=True)
class Packing:
    """A packing of codes and zero points in 32-bit words, `32 / bits` of them in each.

    codes_axis, zeros_axis   the axis along which a word's numbers are consecutive, in the stored
    tensors places                   the positions of the first, second, ... number in the word,
    counted in numbers from its
                             lowest bits
    is_transposed            codes are stored [in, out], scales and zero points [groups of in, out]
    added_zero               the value to add to a stored zero point
    """

    bits: int
    codes_axis: int
    zeros_axis: int
    places: tuple[int, ...]
    is_transposed: bool = False
    added_zero: int = 0

    def spread(self, words: Tensor, axis: int) -> Tensor:
        """Return the numbers in `words` [a, b] int32, `32 / bits` times as many along `axis`."""
        shifts = (
            torch.tensor(self.places, dtype=torch.int32)
            .mul_(self.bits)
            .view(-1, *(1,) * (1 - axis))
        )
        return (
            (words.unsqueeze(axis + 1) >> shifts)
            .bitwise_and_((1 << self.bits) - 1)
            .flatten(axis, axis + 1)
        )


@dataclass(frozen=True)
class QuantizedFormat:
    """A storage format of quantized weights: name suffixes on a common stem, and their meaning.

    codes     suffix and dtype of the tensor of codes; every such tensor belongs to a weight
    weight    suffix of the weight's own name
    scales    suffixes of the tensor of scales; the first one present counts
    zeros     suffix of the tensor of zero points; empty if the format has none
    groups    suffix of the tensor with the block of every column, if blocks are not ranges
    block     rows and columns of a block; 0 means all of them
    zero      the zero point if there is no tensor of them; None if there must be one
    packing   None if codes are stored one by one, [out, in]
    """

    codes: str
    codes_dtype: str
    weight: str
    scales: tuple[str, ...]
    block: tuple[int, int]
    zeros: str = ""
    groups: str = ""
    zero: int | None = 0
    packing: Packing | None = None

    @property
    def turned(self) -> "QuantizedFormat":
        """Return the format of weights whose codes and scales are stored [in, out]."""
        return replace(self, block=(self.block[1], self.block[0]))

    @property
    def kind(self) -> str:
        packing = "" if self.packing is None else f", packed {self.packing}"
        return f"blocks of {self.block}, zero {self.zero}{packing}"


def dequantized(
    tensors: Mapping[str, TensorEntry], form: QuantizedFormat, inputs_first: tuple[str, ...] = ()
) -> Checkpoint:
    """Return the checkpoint of the weights in `tensors`, some of them quantized.

    Nothing is read yet. `inputs_first` has suffixes of weights that are stored [in, out].

    Raises:
        ConfigError: parts of a weight are missing or do not fit each other. The message has the
            first of them.
    """
    taken: set[str] = set()
    entries: dict[str, WeightEntry] = {}
    complaints: list[str] = []
    for name, codes in tensors.items():
        if codes.dtype != form.codes_dtype or not name.endswith(form.codes) or _is_part(name, form):
            continue
        stem = name.removesuffix(form.codes)
        scales = next((stem + ending for ending in form.scales if stem + ending in tensors), None)
        if scales is None:
            complaints.append(f"{name} is {codes.dtype} and has no {stem}{form.scales[0]}")
            continue
        parts = [stem + form.zeros if form.zeros else "", stem + form.groups if form.groups else ""]
        own = form.turned if (stem + form.weight).endswith(inputs_first) else form
        entry = QuantizedEntry(own, codes, tensors[scales], *(tensors.get(part) for part in parts))
        complaints += [f"{name}: {problem}" for problem in entry.problems()]
        entries[stem + form.weight] = entry
        taken.update((name, scales, *parts))
    if complaints:
        raise ConfigError(
            f"quantized weights do not fit their config; {'; '.join(complaints[:4])}"
            f"{f' and {len(complaints) - 4} more' if len(complaints) > 4 else ''}",
            field="quantization_config",
        )
    return Checkpoint(
        {**{name: entry for name, entry in tensors.items() if name not in taken}, **entries}
    )


def _is_part(name: str, form: QuantizedFormat) -> bool:
    """Return whether the tensor is a part of a weight, although it has the dtype of codes."""
    return any(ending and name.endswith(ending) for ending in (form.zeros, form.groups))


@dataclass(frozen=True)
class QuantizedEntry:
    """A `WeightEntry` of several tensors.

    Codes without packing may be a stack of weights, [items, out, in]. Then every part is a stack.
    """

    form: QuantizedFormat
    codes: TensorEntry
    scales: TensorEntry
    zeros: TensorEntry | None = None
    groups: TensorEntry | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        packing = self.form.packing
        if packing is None or len(self.codes.shape) != 2:
            return self.codes.shape
        per_word = _WORD_BITS // packing.bits
        rows, columns = (
            extent * (per_word if axis == packing.codes_axis else 1)
            for axis, extent in enumerate(self.codes.shape)
        )
        return (columns, rows) if packing.is_transposed else (rows, columns)

    @property
    def kind(self) -> str:
        return f"{self.form.kind}: {'; '.join(part.kind for part in self.stored)}"

    @property
    def stored(self) -> tuple[TensorEntry, ...]:
        return tuple(
            part for part in (self.scales, self.zeros, self.groups, self.codes) if part is not None
        )

    def problems(self) -> Iterator[str]:
        """Yield the mismatches between the dtypes and shapes of the parts."""
        if len(self.codes.shape) < 2 or (
            self.form.packing is not None and len(self.codes.shape) > 2
        ):
            yield f"codes of shape {list(self.codes.shape)} are not a matrix"
            return
        if self.scales.dtype not in _SCALES:
            yield f"scales are {self.scales.dtype}, not one of {', '.join(_SCALES)}"
        stack = self.shape[:-2]
        blocks = self._num_blocks
        for what, part, expected in (
            ("scales", self.scales, self._as_stored(blocks)),
            ("zero points", self.zeros, self._zeros_shape(blocks)),
            ("groups", self.groups, self.shape[-1:]),
        ):
            if part is not None and _extents(part.shape) != _extents((*stack, *expected)):
                yield (
                    f"{what} of shape {list(part.shape)} for a weight of {list(self.shape)} in blocks of "
                    f"{self._block[0]} x {self._block[1]}, expected {[*stack, *expected]}"
                )
        if self.zeros is None and self.form.zero is None:
            yield "its zero points are missing"

    def read(
        self, out: Tensor, hashed: "xxhash.xxh3_128 | None", *, item: int | None = None
    ) -> None:
        """Implement `WeightEntry.read`.

        Raises:
            ConfigError: a column has a block number without a scale.
        """
        scales = self._by_block(self._whole(self.scales, hashed, item))
        zeros = (
            None if self.zeros is None else self._zero_points(self._whole(self.zeros, hashed, item))
        )
        of_column = self._blocks_of_columns(scales.shape[1], hashed, item)
        height = self._block[0]
        for rows, columns, codes in self._pieces(hashed, item):
            blocks = slice(rows.start // height, -(-rows.stop // height))
            piece = codes.float()
            if zeros is not None:
                piece -= _spread(zeros[blocks], of_column[columns])
            elif self.form.zero:
                piece -= self.form.zero
            piece *= _spread(scales[blocks], of_column[columns])
            out[rows, columns].copy_(piece)

    def row_scales(self, *, item: int | None = None) -> Tensor | None:
        """Implement `WeightEntry.row_scales`.

        It returns None with a tensor of zero points, because these may move codes beyond a byte.
        """
        if self.form.codes_dtype == "F8_E4M3" or self.zeros is not None or self._num_blocks[1] > 1:
            return None
        of_blocks = self._by_block(self._whole(self.scales, None, item))[:, 0]
        return of_blocks.repeat_interleave(self._block[0])[: self.shape[-2]]

    @property
    def _block(self) -> tuple[int, int]:
        rows, columns = self.shape[-2:]
        return self.form.block[0] or rows, self.form.block[1] or columns

    @property
    def _num_blocks(self) -> tuple[int, int]:
        (rows, columns) = self.shape[-2:]
        (height, width) = self._block
        return -(-rows // height), -(-columns // width)

    @property
    def _is_transposed(self) -> bool:
        return self.form.packing is not None and self.form.packing.is_transposed

    def _as_stored(self, blocks: tuple[int, int]) -> tuple[int, int]:
        return (blocks[1], blocks[0]) if self._is_transposed else blocks

    def _zeros_shape(self, blocks: tuple[int, int]) -> tuple[int, ...]:
        stored = self._as_stored(blocks)
        packing = self.form.packing
        if packing is None:
            return stored
        per_word = _WORD_BITS // packing.bits
        return tuple(
            -(-extent // per_word) if axis == packing.zeros_axis else extent
            for axis, extent in enumerate(stored)
        )

    @staticmethod
    def _whole(part: TensorEntry, hashed: "xxhash.xxh3_128 | None", item: int | None) -> Tensor:
        shape = (part.shape if item is None else part.shape[1:]) or (1,)
        return part.rows(0, shape[0], hashed, item=item)

    def _by_block(self, values: Tensor) -> Tensor:
        """Convert stored scales to fp32, by block of rows and of columns."""
        shaped = values.float().view(self._as_stored(self._num_blocks))
        return shaped.t().contiguous() if self._is_transposed else shaped

    def _zero_points(self, stored: Tensor) -> Tensor:
        """Convert stored zero points to numbers, by block of rows and of columns."""
        packing = self.form.packing
        if packing is None:
            return self._by_block(stored)
        rows, columns = self._as_stored(self._num_blocks)
        return self._by_block(
            packing.spread(stored, packing.zeros_axis)[:rows, :columns].contiguous()
            + packing.added_zero
        )

    def _blocks_of_columns(
        self, num_blocks: int, hashed: "xxhash.xxh3_128 | None", item: int | None
    ) -> Tensor:
        if self.groups is None:
            return torch.arange(self.shape[-1]) // self._block[1]
        groups = self._whole(self.groups, hashed, item).long()
        first = int(groups.min())
        last = int(groups.max())
        if not 0 <= first <= last < num_blocks:
            raise ConfigError(
                f"{self.groups.file.name} puts columns of a weight into groups from {first} to {last}; "
                f"it has scales for {num_blocks}",
                field="model",
            )
        return groups

    def _pieces(
        self, hashed: "xxhash.xxh3_128 | None", item: int | None
    ) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield rows and columns of the weight with its codes there, in stored order.

        The rows of a piece are in one block of rows, or every row is a block.
        """
        (num_rows, num_columns) = self.shape[-2:]
        packing = self.form.packing
        height = self._block[0]
        stored_rows = self.codes.shape[-2]
        limit = max(1, _PIECE_NUMBERS * stored_rows // (num_rows * num_columns))
        start = 0
        while start < stored_rows:
            count = min(limit, stored_rows - start)
            if packing is not None and packing.is_transposed:
                words = packing.spread(self.codes.rows(start, count, hashed), packing.codes_axis)
                per_row = num_columns // stored_rows
                yield (
                    slice(0, num_rows),
                    slice(start * per_row, (start + count) * per_row),
                    words.t(),
                )
            else:
                count = count if height == 1 else min(count, height - start % height)
                codes = self.codes.rows(start, count, hashed, item=item)
                yield (
                    slice(start, start + count),
                    slice(0, num_columns),
                    codes if packing is None else packing.spread(codes, packing.codes_axis),
                )
            start += count


def _extents(shape: tuple[int, ...]) -> list[int]:
    """Return the shape without axes of length 1, which formats add or omit."""
    return [extent for extent in shape if extent != 1]


def _spread(by_block: Tensor, of_column: Tensor) -> Tensor:
    """Expand [n, blocks] to [n, columns], or to [n, 1] if there is one block."""
    return by_block if by_block.shape[1] == 1 else by_block[:, of_column]
