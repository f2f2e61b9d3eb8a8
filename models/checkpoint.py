"""The safetensors files of a checkpoint: an index over their headers, and reads of single tensors.

Format of a file: 8 bytes little-endian header length, a JSON header naming each tensor's dtype, shape and byte range,
then the bytes. Nothing is mapped: a tensor's bytes are read straight into the memory they are used from.
"""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from engine.core.layer_range import Part
from models.weights_digest import WeightsDigest
from runtime.errors import ConfigError

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64,
           "I64": torch.int64, "BOOL": torch.bool}
_MAX_HEADER_BYTES = 100 << 20
_COMPARED_BYTES = 16 << 20
_NONSENSE = (ValueError, KeyError, TypeError, AttributeError, OverflowError)  # what json and its readers raise
_READ_BYTES = 256 << 10  # what was just read is digested while it is in the core's own cache


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies. `dtype` is the format's name ("BF16")."""

    file: Path
    offset: int  # absolute, in bytes
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Checkpoint:
    """All tensors of a checkpoint by the names its files give them."""

    entries: dict[str, TensorEntry]


def open_checkpoint(folder: Path) -> Checkpoint:
    """Index `model.safetensors`, or the files `model.safetensors.index.json` lists. Reads headers only: the weights are
    digested as they are read (`read_tensor`).

    Raises:
        ConfigError: no such file, or one that is truncated or not safetensors.
    """
    entries: dict[str, TensorEntry] = {}
    for file, listed in _weight_files(folder).items():
        found = _read_header(file)
        absent = sorted(listed - found.keys())
        if absent:
            raise ConfigError(f"{file.name} lacks tensors its index lists: {_names(absent)}", field="model")
        entries.update({name: entry for name, entry in found.items() if not listed or name in listed})
    return Checkpoint(entries=entries)


def read_tensor(entry: TensorEntry, out: Tensor, *, name: str, digest: WeightsDigest | None,
                item: int | None = None) -> None:
    """Copy a tensor, or its `item`-th entry along the first axis, into `out`, converting the dtype if they differ. Of
    what goes to a device one tensor at a time lies on the host. Every byte of the file that is read goes into `digest`
    under `name`, if there is one.

    Raises:
        ConfigError: a dtype only quantised checkpoints have, or a file that ends early.
    """
    stored = _stored_dtype(entry)
    in_place = stored == out.dtype and out.device.type == "cpu"
    target = out if in_place else torch.empty(out.shape, dtype=stored)
    offset = entry.offset if item is None else entry.offset + item * target.nbytes
    hashed = None if digest is None else xxhash.xxh3_128()
    _read_exactly(entry.file, offset, target, hashed)
    if digest is not None and hashed is not None:
        digest.add(name, f"{entry.dtype} {list(entry.shape)}", hashed.digest(), item=item)
    if target is not out:
        out.copy_(target)


def read_rows(entry: TensorEntry, out: Tensor, rows: Sequence[Part], columns: Part | None, *, name: str,
              digest: WeightsDigest | None, item: int | None = None) -> None:
    """Likewise copy these rows of a tensor, one interval behind the other, and of each the `columns` (None: all). All
    bytes are read and digested, whatever is kept, a few rows at a time.

    Raises:
        ConfigError: as `read_tensor`.
    """
    stored, (count, *row_shape) = _stored_dtype(entry), entry.shape if item is None else entry.shape[1:]
    row_bytes = math.prod(row_shape) * stored.itemsize
    offset, at_once = entry.offset + (item or 0) * count * row_bytes, max(1, _READ_BYTES // max(1, row_bytes))
    passing = torch.empty(min(at_once, count), *row_shape, dtype=stored)
    kept = slice(None) if columns is None else slice(columns.start, columns.stop)
    hashed = None if digest is None else xxhash.xxh3_128()
    for start in range(0, count, at_once):
        read = passing[:count - start]
        _read_exactly(entry.file, offset + start * row_bytes, read, hashed)
        at = 0
        for part in rows:
            first, last = max(start, part.start), min(start + len(read), part.stop)
            if first < last:
                place = at + first - part.start
                taken = read[first - start:last - start]
                out[place:place + last - first].copy_(taken if columns is None else taken[..., kept])
            at += len(part)
    if digest is not None and hashed is not None:
        digest.add(name, f"{entry.dtype} {list(entry.shape)}", hashed.digest(), item=item)


def same_content(a: TensorEntry, b: TensorEntry) -> bool:
    """Whether two tensors are the same numbers of the same type in the same shape. Reads up to the first difference.

    Raises:
        ConfigError: a file that ends early.
    """
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    pieces = [torch.empty(min(_COMPARED_BYTES, a.num_bytes), dtype=torch.uint8) for _ in range(2)]
    for start in range(0, a.num_bytes, _COMPARED_BYTES):
        own, other = (piece[:a.num_bytes - start] for piece in pieces)
        _read_exactly(a.file, a.offset + start, own, None)
        _read_exactly(b.file, b.offset + start, other, None)
        if not torch.equal(own, other):
            return False
    return True


def _stored_dtype(entry: TensorEntry) -> torch.dtype:
    if entry.dtype not in _DTYPES:
        raise ConfigError(f"{entry.file.name} holds {entry.dtype} weights; only BF16, F16 and F32 are supported",
                          field="model")
    return _DTYPES[entry.dtype]


def _weight_files(folder: Path) -> dict[Path, set[str]]:
    """Files in name order, each with the tensors that an index lists for it (empty without an index)."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if not index.exists():
        if not single.exists():
            raise ConfigError(f"{folder} has neither model.safetensors nor model.safetensors.index.json", field="model")
        return {single: set()}
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files: dict[Path, set[str]] = {}
        for name, file in sorted(weight_map.items(), key=lambda pair: (pair[1], pair[0])):
            files.setdefault(folder / Path(file).name, set()).add(name)
        absent = [file.name for file in files if not file.is_file()]
    except (OSError, RecursionError, *_NONSENSE) as error:
        raise ConfigError(f"{index} is not a safetensors index: {_shortly(error)}", field="model") from error
    if absent:
        raise ConfigError(f"{folder} lacks files its index lists: {_names(absent)}", field="model")
    return files


def _read_header(file: Path) -> dict[str, TensorEntry]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise ConfigError(f"{file} is not a safetensors file: header of {length} bytes in a file of {size}",
                              field="model")
        header = stream.read(length)
    try:
        return _parse_header(file, json.loads(header), data_start=8 + length, size=size)
    except (RecursionError, *_NONSENSE) as error:
        raise ConfigError(f"{file} has a damaged safetensors header: {_shortly(error)}", field="model") from error


def _parse_header(file: Path, header: dict[str, Any], *, data_start: int, size: int) -> dict[str, TensorEntry]:
    entries = {}
    for name, fields in header.items():
        if name == "__metadata__":
            continue
        dtype, shape = str(fields["dtype"]), tuple(int(extent) for extent in fields["shape"])
        start, end = (int(offset) for offset in fields["data_offsets"])
        if not 0 <= start <= end or any(extent < 0 for extent in shape):
            raise ValueError(f"{name} of shape {list(shape)} lies from {start} to {end}")
        if data_start + end > size:
            raise ConfigError(f"{file} is truncated: {name} ends at byte {data_start + end} of {size}", field="model")
        if dtype in _DTYPES and math.prod(shape) * _DTYPES[dtype].itemsize != end - start:
            raise ValueError(f"{name} of {dtype} {list(shape)} has {end - start} bytes")
        entries[name] = TensorEntry(file=file, offset=data_start + start, num_bytes=end - start, dtype=dtype,
                                    shape=shape)
    return entries


def _read_exactly(file: Path, offset: int, out: Tensor, hashed: "xxhash.xxh3_128 | None") -> None:
    """Fill `out`; `hashed` takes up what was read."""
    view = out.view(-1).view(torch.uint8).numpy().data
    with file.open("rb", buffering=0) as stream:
        while view:
            count = os.preadv(stream.fileno(), [view[:_READ_BYTES]], offset)
            if count == 0:
                raise ConfigError(f"{file} ended while it was read", field="model")
            if hashed is not None:
                hashed.update(view[:count])
            view, offset = view[count:], offset + count


def _shortly(error: Exception) -> str:
    return repr(error)[:200]


def _names(names: list[str]) -> str:
    """The first few of a list of names, for a message."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
