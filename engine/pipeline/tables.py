"""Records as bytes: a declared table lists the arrays of a record, and both writing and reading follow it.

    record   one uint32 per size of the table, then the arrays, each at a multiple of 8

A *size* is an extent with a name. The record states it once, and every array that names it has that extent. Both ends
have the same tables (the schema in the frame's header says so), so neither dtypes nor names travel.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from runtime.errors import InternalError

Array = NDArray[Any]
RecordBytes = bytes | bytearray | memoryview
_ALIGNMENT = 8


@dataclass(frozen=True)
class Column:
    """One array of a record. `shape`: each extent is a number or the name of a size. A dtype with fields makes each
    element a row of named values."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | str, ...]


def column(name: str, dtype: DTypeLike, *shape: int | str) -> Column:
    return Column(name, np.dtype(dtype), shape)


def row_type(**fields: str) -> np.dtype[Any]:
    """A dtype with these fields, one after the other."""
    return np.dtype(list(fields.items()))


def lists(name: str, dtype: DTypeLike, *, per: str) -> tuple[Column, Column]:
    """Columns of one list of values for each of the size `per`: their lengths, and all values."""
    return column(f"{name}.lengths", np.int32, per), column(name, dtype, f"{name}.total")


class Table:
    """The arrays of one kind of record, in the order in which they lie."""

    def __init__(self, name: str, *columns: Column) -> None:
        self._name = name
        self._columns = columns
        self._sizes = tuple(dict.fromkeys(extent for each in columns for extent in each.shape
                                          if isinstance(extent, str)))
        self._head = struct.Struct(f"<{len(self._sizes)}I")

    @property
    def layout(self) -> str:
        """All that both ends must have alike, as text."""
        columns = [f"{each.name} {each.dtype.descr} {each.shape}" for each in self._columns]
        return "; ".join([self._name, *columns])

    def write(self, values: Mapping[str, object]) -> bytearray:
        """`values` by column: what numpy makes an array of the column's dtype and shape of.

        Raises:
            InternalError: a column is missing or has another shape than the table says.
        """
        sizes, arrays, end = dict.fromkeys(self._sizes, -1), [], self._head.size
        for each in self._columns:
            array = np.ascontiguousarray(values[each.name], each.dtype)
            self._bind(sizes, each, array.shape)
            start = _aligned(end)
            arrays.append((start, array))
            end = start + array.nbytes
        record = bytearray(end)
        self._head.pack_into(record, 0, *sizes.values())
        for start, array in arrays:
            if array.nbytes:
                record[start:start + array.nbytes] = array.reshape(-1).view(np.uint8).data
        return record

    def read(self, record: RecordBytes) -> dict[str, Array]:
        """Arrays by column. They copy nothing: they live as long as the record's memory.

        Raises:
            ValueError: the record is shorter or longer than its own sizes say.
        """
        if len(record) < self._head.size:
            raise ValueError(f"a {self._name} of {len(record)} bytes has no room for its sizes")
        sizes = dict(zip(self._sizes, self._head.unpack_from(record, 0), strict=True))
        arrays, end = {}, self._head.size
        for each in self._columns:
            shape = tuple(sizes[extent] if isinstance(extent, str) else extent for extent in each.shape)
            start, count = _aligned(end), math.prod(shape)
            end = start + count * each.dtype.itemsize
            if end > len(record):
                raise ValueError(f"{each.name} {shape} ends at {end} of {len(record)} bytes")
            arrays[each.name] = np.frombuffer(record, each.dtype, count, start).reshape(shape)
        if end != len(record):
            raise ValueError(f"a {self._name} of {len(record)} bytes ends at {end}")
        return arrays

    def _bind(self, sizes: dict[str, int], each: Column, shape: tuple[int, ...]) -> None:
        if len(shape) != len(each.shape):
            raise InternalError(f"{each.name} of a {self._name} has the shape {shape}, not {each.shape}")
        for extent, found in zip(each.shape, shape, strict=True):
            expected = extent if isinstance(extent, int) else sizes[extent]
            if isinstance(extent, str) and expected < 0:
                sizes[extent] = expected = found
            if expected != found:
                raise InternalError(f"{each.name} of a {self._name} has the shape {shape}, {extent} is {expected}")


def put_lists(name: str, values: Sequence[Sequence[object]]) -> dict[str, object]:
    """The values of the columns that `lists` declared."""
    return {f"{name}.lengths": [len(value) for value in values], name: [item for value in values for item in value]}


def get_lists(arrays: Mapping[str, Array], name: str) -> list[tuple[Any, ...]]:
    """What `put_lists` was given. Raises ValueError when the lengths are not those of the values."""
    values = arrays[name].tolist()
    return [tuple(values[start:end]) for start, end in _spans(arrays, name)]


def put_texts(name: str, texts: Sequence[str]) -> dict[str, object]:
    """`put_lists` of texts in UTF-8, in columns of bytes."""
    return put_bytes(name, [text.encode() for text in texts])


def get_texts(arrays: Mapping[str, Array], name: str) -> list[str]:
    """What `put_texts` was given. Raises ValueError as `get_lists` does, and for what is not UTF-8."""
    return [text.decode() for text in get_bytes(arrays, name)]


def put_bytes(name: str, values: Sequence[bytes]) -> dict[str, object]:
    """`put_lists` of byte strings, in columns of bytes."""
    return {f"{name}.lengths": [len(value) for value in values], name: np.frombuffer(b"".join(values), np.uint8)}


def get_bytes(arrays: Mapping[str, Array], name: str) -> list[bytes]:
    """What `put_bytes` was given. Raises ValueError as `get_lists` does."""
    whole = arrays[name].tobytes()
    return [whole[start:end] for start, end in _spans(arrays, name)]


def counts_of(counts: Array, total: int, name: str) -> list[int]:
    """Whole numbers that add up to `total`. Raises ValueError when they do not, or one is below 0."""
    found: list[int] = counts.tolist()
    if min(found, default=0) < 0 or sum(found) != total:
        raise ValueError(f"{name}: {sum(found)} in all, {total} are there")
    return found


def _spans(arrays: Mapping[str, Array], name: str) -> list[tuple[int, int]]:
    ends = list(accumulate(counts_of(arrays[f"{name}.lengths"], len(arrays[name]), name), initial=0))
    return list(pairwise(ends))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
