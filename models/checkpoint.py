"""The safetensors files of a checkpoint: an index of their headers, and reads of single weights.

A file has an 8-byte little-endian header length, a JSON header with the dtype, shape and byte range
of each tensor, and then the bytes. Files are not memory-mapped: the bytes of a tensor are read
straight into their final memory.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash
from torch import Tensor

from engine.core.layer_range import Part
from models.weights_digest import WeightsDigest
from runtime.errors import ConfigError
from runtime.model_files.weights import shortened, weight_files

_PLAIN = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "BOOL": torch.bool,
}
_DTYPES = {
    **_PLAIN,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
}
# dtypes that a model may run in
_RUNNING = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_MAX_HEADER_BYTES = 100 << 20
_COMPARED_BYTES = 16 << 20
# Errors that json and the readers of its values raise.
_NONSENSE = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
)
_READ_BYTES = 256 << 10  # small enough to be hashed while it is still in the core's cache


class WeightEntry(Protocol):
    """One weight of a model, independent of its storage format. `shape` is that of the weight."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def kind(self) -> str:
        """Return the stored dtypes and shapes, for digests and comparisons."""
        ...

    @property
    def stored(self) -> "tuple[TensorEntry, ...]":
        """Return the tensors of the files that form the weight."""
        ...

    def read(
        self, out: Tensor, hashed: "xxhash.xxh3_128 | None", *, item: int | None = None
    ) -> None:
        """Read the weight into `out`; see `read_tensor`. `hashed` gets every byte that is read."""
        ...

    def row_scales(self, *, item: int | None = None) -> Tensor | None:
        """Return [rows] fp32 scales, or None.

        There are scales if every row is integer codes of at most a byte times one scale.
        """
        ...


@dataclass(frozen=True)
class TensorEntry:
    """The location of one tensor.

    It is also a `WeightEntry` for a weight that is stored without quantization. `dtype` is the name
    in the file's format, such as "BF16".
    """

    file: Path
    offset: int  # absolute, in bytes
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def kind(self) -> str:
        return f"{self.dtype} {list(self.shape)}"

    @property
    def stored(self) -> "tuple[TensorEntry, ...]":
        return (self,)

    @property
    def plain_dtype(self) -> torch.dtype:
        """Return the torch dtype.

        Raises:
            ConfigError: only quantized checkpoints have this dtype.
        """
        if self.dtype not in _PLAIN:
            raise ConfigError(
                f"{self.file.name} holds {self.dtype} weights that its config does not describe; "
                f"without a quantization_config only BF16, F16 and F32 are supported",
                field="model",
            )
        return _PLAIN[self.dtype]

    def read(
        self, out: Tensor, hashed: "xxhash.xxh3_128 | None", *, item: int | None = None
    ) -> None:
        """Read the tensor into `out`.

        Raises:
            ConfigError: only quantized checkpoints have this dtype.
        """
        stored = self.plain_dtype
        in_place = stored == out.dtype and out.device.type == "cpu"
        target = out if in_place else torch.empty(out.shape, dtype=stored)
        _read_exactly(self.file, self.offset + (item or 0) * target.nbytes, target, hashed)
        if target is not out:
            out.copy_(target)

    def row_scales(self, *, item: int | None = None) -> None:
        """Return None: the weight has no scales."""

    def rows(
        self, start: int, count: int, hashed: "xxhash.xxh3_128 | None", *, item: int | None = None
    ) -> Tensor:
        """Read `count` rows from row `start` on, in the stored dtype, [count, ...].

        In a stack they are the rows of entry `item`.
        """
        shape = (self.shape if item is None else self.shape[1:]) or (1,)
        piece = torch.empty((count, *shape[1:]), dtype=_DTYPES[self.dtype])
        before = (item or 0) * math.prod(shape) + start * math.prod(shape[1:])
        _read_exactly(self.file, self.offset + before * piece.itemsize, piece, hashed)
        return piece


@dataclass(frozen=True)
class TransposedStack:
    """A `WeightEntry` [items, out, in] over one that the files store as [items, in, out]."""

    held: WeightEntry

    @property
    def shape(self) -> tuple[int, ...]:
        *stack, columns, rows = self.held.shape
        return (*stack, rows, columns)

    @property
    def kind(self) -> str:
        return self.held.kind

    @property
    def stored(self) -> "tuple[TensorEntry, ...]":
        return self.held.stored

    def read(
        self, out: Tensor, hashed: "xxhash.xxh3_128 | None", *, item: int | None = None
    ) -> None:
        """Implement `WeightEntry.read`."""
        turned = torch.empty(out.mT.shape, dtype=out.dtype)
        self.held.read(turned, hashed, item=item)
        out.copy_(turned.mT)

    def row_scales(self, *, item: int | None = None) -> None:
        """Return None: transposed weights have no row scales."""


def transposed(entry: WeightEntry) -> WeightEntry:
    """Return a stack whose matrices are the transposed ones of `entry`."""
    return entry.held if isinstance(entry, TransposedStack) else TransposedStack(entry)


@dataclass(frozen=True)
class Checkpoint:
    """All weights of a checkpoint, by their names in its files."""

    entries: Mapping[str, WeightEntry]

    def usual_dtype(self) -> str:
        """Return torch's name of the most frequent dtype, by stored numbers.

        Quantized weights are ignored. The default is float32.
        """
        counts: Counter[str] = Counter()
        for entry in self.entries.values():
            if isinstance(entry, TensorEntry) and entry.dtype in _RUNNING:
                counts[entry.dtype] += math.prod(entry.shape)
        return _RUNNING[max(counts, key=lambda dtype: counts[dtype], default="F32")]


def open_tensors(folder: Path) -> dict[str, TensorEntry]:
    """Return all tensors of a folder by name.

    Only headers are read. Weights are digested when they are read (`read_tensor`).

    Raises:
        ConfigError: a file is missing, truncated or not safetensors.
    """
    entries: dict[str, TensorEntry] = {}
    for file, listed in weight_files(folder).tensors.items():
        found = _read_header(file)
        absent = sorted(listed - found.keys())
        if absent:
            raise ConfigError(
                f"{file.name} lacks tensors its index lists: {shortened(absent)}", field="model"
            )
        entries.update(
            {name: entry for name, entry in found.items() if not listed or name in listed}
        )
    return entries


def read_tensor(
    entry: WeightEntry,
    out: Tensor,
    *,
    name: str,
    digest: WeightsDigest | None,
    item: int | None = None,
) -> None:
    """Copy a tensor, or its entry `item` along the first axis, into `out`.

    The dtype is converted if it differs. For a device, only one tensor at a time is on the host.
    Every byte that is read from the file is added to `digest`, if given, under `name`. Nothing is
    read for an `out` on the device "meta".

    Raises:
        ConfigError: only quantized checkpoints have this dtype, or a file ends early.
    """
    if out.is_meta:
        return
    hashed = None if digest is None else xxhash.xxh3_128()
    entry.read(out, hashed, item=item)
    if digest is not None and hashed is not None:
        digest.add(name, entry.kind, hashed.digest(), item=item)


def read_rows(
    entry: WeightEntry,
    out: Tensor,
    rows: Sequence[Part],
    columns: Part | None,
    *,
    name: str,
    digest: WeightsDigest | None,
    item: int | None = None,
) -> None:
    """Copy intervals of rows of a tensor into `out`, one after another, and of each row `columns`.

    `columns` None means all columns. All bytes of the tensor are read and digested. An unquantized
    weight is read a few rows at a time.

    Raises:
        ConfigError: as `read_tensor`.
    """
    hashed = None if digest is None else xxhash.xxh3_128()
    for start, read in _in_pieces(entry, out.dtype, hashed, item):
        at = 0
        for part in rows:
            first = max(start, part.start)
            last = min(start + len(read), part.stop)
            if first < last:
                place = at + first - part.start
                taken = read[first - start : last - start]
                out[place : place + last - first].copy_(
                    taken if columns is None else taken[..., columns.start : columns.stop]
                )
            at += len(part)
    if digest is not None and hashed is not None:
        digest.add(name, entry.kind, hashed.digest(), item=item)


def _in_pieces(
    entry: WeightEntry, dtype: torch.dtype, hashed: "xxhash.xxh3_128 | None", item: int | None
) -> Iterator[tuple[int, Tensor]]:
    """Yield all rows in pieces, each with the index of its first row."""
    shape = entry.shape if item is None else entry.shape[1:]
    if not isinstance(entry, TensorEntry):
        whole = torch.empty(shape, dtype=dtype)
        entry.read(whole, hashed, item=item)
        yield 0, whole
        return
    at_once = max(1, _READ_BYTES // max(1, math.prod(shape[1:]) * entry.plain_dtype.itemsize))
    for start in range(0, shape[0], at_once):
        yield start, entry.rows(start, min(at_once, shape[0] - start), hashed, item=item)


def same_content(a: WeightEntry, b: WeightEntry) -> bool:
    """Return whether two weights have the same numbers, dtype and shape.

    It reads up to the first difference.

    Raises:
        ConfigError: a file ends early.
    """
    return a.kind == b.kind and all(
        _same_bytes(*pair) for pair in zip(a.stored, b.stored, strict=True)
    )


def _same_bytes(a: TensorEntry, b: TensorEntry) -> bool:
    """Return whether two tensors of equal size have the same bytes."""
    pieces = [torch.empty(min(_COMPARED_BYTES, a.num_bytes), dtype=torch.uint8) for _ in range(2)]
    for start in range(0, a.num_bytes, _COMPARED_BYTES):
        own, other = (piece[: a.num_bytes - start] for piece in pieces)
        _read_exactly(a.file, a.offset + start, own, None)
        _read_exactly(b.file, b.offset + start, other, None)
        if not torch.equal(own, other):
            return False
    return True


def _read_header(file: Path) -> dict[str, TensorEntry]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise ConfigError(
                f"{file} is not a safetensors file: header of {length} bytes in a file of {size}",
                field="model",
            )
        header = stream.read(length)
    try:
        return _parse_header(file, json.loads(header), data_start=8 + length, size=size)
    except (RecursionError, *_NONSENSE) as error:
        raise ConfigError(
            f"{file} has a damaged safetensors header: {_shortly(error)}", field="model"
        ) from error


def _parse_header(
    file: Path, header: dict[str, Any], *, data_start: int, size: int
) -> dict[str, TensorEntry]:
    entries = {}
    for name, fields in header.items():
        if name == "__metadata__":
            continue
        dtype = str(fields["dtype"])
        shape = tuple(int(extent) for extent in fields["shape"])
        start, end = (int(offset) for offset in fields["data_offsets"])
        if not 0 <= start <= end or any(extent < 0 for extent in shape):
            raise ValueError(f"{name} of shape {list(shape)} has data offsets {start} to {end}")
        if data_start + end > size:
            raise ConfigError(
                f"{file} is truncated: {name} ends at byte {data_start + end} of {size}",
                field="model",
            )
        if dtype in _DTYPES and math.prod(shape) * _DTYPES[dtype].itemsize != end - start:
            raise ValueError(f"{name} of {dtype} {list(shape)} has {end - start} bytes")
        entries[name] = TensorEntry(
            file=file, offset=data_start + start, num_bytes=end - start, dtype=dtype, shape=shape
        )
    return entries


def _read_exactly(file: Path, offset: int, out: Tensor, hashed: "xxhash.xxh3_128 | None") -> None:
    """Fill `out` from the file, and add the bytes to `hashed`."""
    view = out.view(-1).view(torch.uint8).numpy().data
    with file.open("rb", buffering=0) as stream:
        while view:
            count = os.preadv(stream.fileno(), [view[:_READ_BYTES]], offset)
            if count == 0:
                raise ConfigError(f"{file} ended while it was read", field="model")
            if hashed is not None:
                hashed.update(view[:count])
            view = view[count:]
            offset = offset + count


def _shortly(error: Exception) -> str:
    return repr(error)[:200]
