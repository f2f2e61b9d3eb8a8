"""Weights of quantised checkpoints, turned into the model's own type while they are read.

A weight w [out, in] is stored as codes of 4 or 8 bits and, for every block of it, a scale and
perhaps a zero point:

    w[r, c] = (code[r, c] - zero[b(r), b(c)]) * scale[b(r), b(c)]

computed in fp32, where both operations on codes of up to 8 bits and scales of 16 are exact, and
rounded once. Which tensors hold the parts, and how codes are packed, is the format's
(`quantised_formats`). A weight is read in pieces of some MiB, so that what it takes beside its
final form does not grow with it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
import xxhash
from torch import Tensor

from models.checkpoint import Checkpoint, TensorEntry, WeightEntry
from runtime.errors import ConfigError

_PIECE_NUMBERS = 1 << 20  # of a weight, that are spread out in fp32 at a time
_WORD_BITS = 32
_SCALES = ("F32", "BF16", "F16", "F8_E8M0")


@dataclass(frozen=True)
class Packing:
    """Codes and zero points in 32-bit words, `32 / bits` of them in one.

    codes_axis, zeros_axis   along which a word's numbers follow each other, in the tensors as they are stored
    places                   where in the word its first, second, ... number is, counted in numbers from its lowest bits
    is_transposed            codes are stored [in, out], scales and zero points [groups of in, out]
    added_zero               what a stored zero point lacks
    """

    bits: int
    codes_axis: int
    zeros_axis: int
    places: tuple[int, ...]
    is_transposed: bool = False
    added_zero: int = 0

    def spread(self, words: Tensor, axis: int) -> Tensor:
        """words: [a, b] int32. Returns the numbers in them, `32 / bits` times as many along
        `axis`."""
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
class QuantisedFormat:
    """How a checkpoint stores its quantised weights: endings of names on a common stem, and what
    they hold.

    codes     ending of the tensor of codes and their dtype; a weight is what has such a tensor
    weight    ending of the weight's own name
    scales    endings of the tensor of scales; the first that is there counts
    zeros     ending of the tensor of zero points; empty where the format has none
    groups    ending of the tensor that names the block of every column, where blocks are no ranges
    block     rows and columns of a block; 0: all of them
    zero      the zero point where there is no tensor of them; None: there must be one
    packing   None: codes are stored one by one, [out, in]
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
    def turned(self) -> "QuantisedFormat":
        """Of weights that are stored [in, out], codes and scales."""
        return replace(self, block=(self.block[1], self.block[0]))

    @property
    def kind(self) -> str:
        packing = "" if self.packing is None else f", packed {self.packing}"
        return f"blocks of {self.block}, zero {self.zero}{packing}"


def dequantised(
    tensors: Mapping[str, TensorEntry], form: QuantisedFormat, inputs_first: tuple[str, ...] = ()
) -> Checkpoint:
    """The checkpoint whose weights these tensors hold, some of them quantised; nothing is read yet.
    `inputs_first`: ends of names of weights that are stored [in, out].

    Raises:
        ConfigError: parts of a weight are missing or do not fit each other. The first of them are
            in the message.
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
        entry = QuantisedEntry(own, codes, tensors[scales], *(tensors.get(part) for part in parts))
        complaints += [f"{name}: {problem}" for problem in entry.problems()]
        entries[stem + form.weight] = entry
        taken.update((name, scales, *parts))
    if complaints:
        raise ConfigError(
            f"quantised weights do not fit their config; {'; '.join(complaints[:4])}"
            f"{f' and {len(complaints) - 4} more' if len(complaints) > 4 else ''}",
            field="quantization_config",
        )
    return Checkpoint(
        {**{name: entry for name, entry in tensors.items() if name not in taken}, **entries}
    )


def _is_part(name: str, form: QuantisedFormat) -> bool:
    """Of a weight, though it has the dtype of codes."""
    return any(ending and name.endswith(ending) for ending in (form.zeros, form.groups))


@dataclass(frozen=True)
class QuantisedEntry:
    """A `WeightEntry` of several tensors. Codes without packing may be a stack of weights, [items,
    out, in]; then every part is one."""

    form: QuantisedFormat
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
        """What does not fit in the parts' types and shapes."""
        if len(self.codes.shape) < 2 or (
            self.form.packing is not None and len(self.codes.shape) > 2
        ):
            yield f"codes of shape {list(self.codes.shape)} are no matrix"
            return
        if self.scales.dtype not in _SCALES:
            yield f"scales are {self.scales.dtype}, not one of {', '.join(_SCALES)}"
        stack, blocks = self.shape[:-2], self._num_blocks
        for what, part, expected in (
            ("scales", self.scales, self._as_stored(blocks)),
            ("zero points", self.zeros, self._zeros_shape(blocks)),
            ("groups", self.groups, self.shape[-1:]),
        ):
            if part is not None and _extents(part.shape) != _extents((*stack, *expected)):
                yield (
                    f"{what} of shape {list(part.shape)} for a weight of {list(self.shape)} in blocks of "
                    f"{self._block[0]} x {self._block[1]}, which takes {[*stack, *expected]}"
                )
        if self.zeros is None and self.form.zero is None:
            yield "its zero points are missing"

    def read(
        self, out: Tensor, hashed: "xxhash.xxh3_128 | None", *, item: int | None = None
    ) -> None:
        """See `WeightEntry.read`. Raises ConfigError for a block number that there is no scale
        for."""
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
        """See `WeightEntry.row_scales`. A zero point of a tensor may move codes beyond a byte."""
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
        (rows, columns), (height, width) = self.shape[-2:], self._block
        return -(-rows // height), -(-columns // width)

    @property
    def _is_transposed(self) -> bool:
        return self.form.packing is not None and self.form.packing.is_transposed

    def _as_stored(self, blocks: tuple[int, int]) -> tuple[int, int]:
        return (blocks[1], blocks[0]) if self._is_transposed else blocks

    def _zeros_shape(self, blocks: tuple[int, int]) -> tuple[int, ...]:
        stored, packing = self._as_stored(blocks), self.form.packing
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
        """Scales as they are stored to fp32 by block of rows and of columns."""
        shaped = values.float().view(self._as_stored(self._num_blocks))
        return shaped.t().contiguous() if self._is_transposed else shaped

    def _zero_points(self, stored: Tensor) -> Tensor:
        """Likewise."""
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
        first, last = int(groups.min()), int(groups.max())
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
        """Rows and columns of the weight, and its codes there, in the order in which they are
        stored. A piece's rows lie in one block of rows, or every row is a block."""
        (num_rows, num_columns), packing, height = (
            self.shape[-2:],
            self.form.packing,
            self._block[0],
        )
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
    """Without axes of length 1, which formats add and leave out as they like."""
    return [extent for extent in shape if extent != 1]


def _spread(by_block: Tensor, of_column: Tensor) -> Tensor:
    """[n, blocks] of columns to [n, columns], or to [n, 1] if there is one block."""
    return by_block if by_block.shape[1] == 1 else by_block[:, of_column]
