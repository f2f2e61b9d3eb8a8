"""Records as bytes: declared tables list the columns of a record, and both writing and reading follow them.

    record   one uint64, bit n of which says that the n-th table is there, then those tables
    table    one uint32 per size of the table, then the columns, each at a multiple of 8

A *size* is an extent with a name. The table states it once, and every column that names it has that extent. Both ends
have the same tables (the schema in the frame's header says so), so neither dtypes nor names travel.

A step has few rows, so that what Python does per column is what a record costs. A table that has nothing to say is
left out, and what no tensor is made of is read as Python's own values, not as arrays.
"""

import math
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from runtime.errors import InternalError

T = TypeVar("T")
Array = NDArray[Any]
RecordBytes = bytes | bytearray | memoryview
Shape = tuple[int, ...]
_ALIGNMENT = 8
_PADDING = tuple(map(bytes, range(_ALIGNMENT)))
_PRESENT = struct.Struct("<Q")
_CODES = {"u1": "B", "i4": "i", "i8": "q", "u8": "Q", "f8": "d"}  # of `struct` and `array`


class Column(Protocol):
    """One column of a record. `shape`: each extent is a number or the name of a size."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of one element, as it lies in the record."""
        ...

    @property
    def shape(self) -> tuple[int | str, ...]: ...

    def encode(self, value: Sequence[Any]) -> tuple[bytes, Shape]:
        """Its bytes and their shape."""
        ...

    def decode(self, content: memoryview, shape: Shape) -> object:
        """What `encode` was given; arrays copy nothing."""
        ...


@dataclass(frozen=True)
class _Arrays:
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | str, ...]

    def encode(self, value: Sequence[Any]) -> tuple[bytes, Shape]:
        found = np.ascontiguousarray(value, self.dtype)
        return found.tobytes(), found.shape

    def decode(self, content: memoryview, shape: Shape) -> Array:
        return np.frombuffer(content, self.dtype).reshape(shape)


@dataclass(frozen=True)
class _Tuples:
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | str]
    row: struct.Struct

    def encode(self, value: Sequence[Any]) -> tuple[bytes, Shape]:
        return b"".join([self.row.pack(*row) for row in value]), (len(value),)

    def decode(self, content: memoryview, shape: Shape) -> list[tuple[Any, ...]]:
        return list(self.row.iter_unpack(content))


@dataclass(frozen=True)
class _Numbers:
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | str]
    code: str

    def encode(self, value: Sequence[Any]) -> tuple[bytes, Shape]:
        return array(self.code, value).tobytes() if value else b"", (len(value),)

    def decode(self, content: memoryview, shape: Shape) -> list[Any]:
        return array(self.code, bytes(content)).tolist()


@dataclass(frozen=True)
class _Octets:
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | str]

    def encode(self, value: Sequence[Any]) -> tuple[bytes, Shape]:
        return bytes(value), (len(value),)

    def decode(self, content: memoryview, shape: Shape) -> bytes:
        return bytes(content)


def column(name: str, dtype: DTypeLike, *shape: int | str) -> Column:
    """An array."""
    return _Arrays(name, np.dtype(dtype), shape)


def tuples(name: str, size: int | str, **fields: str) -> Column:
    """A list of tuples, each of which has a number for each of the fields (name: "u1", "i4", "i8", "u8" or "f8")."""
    code = "<" + "".join(_CODES[kind] for kind in fields.values())
    return _Tuples(name, np.dtype(list(fields.items())), (size,), struct.Struct(code))


def numbers(name: str, kind: str, size: int | str) -> Column:
    """A list of numbers of that kind (see `tuples`)."""
    return _Numbers(name, np.dtype(kind), (size,), _CODES[kind])


def octets(name: str, size: int | str) -> Column:
    """A byte string."""
    return _Octets(name, np.dtype("u1"), (size,))


def lists(values: Column, *, per: str) -> tuple[Column, Column]:
    """Columns of one list of values for each of the size `per`: their lengths, and all values, which `values` holds."""
    return numbers(f"{values.name}.lengths", "i4", per), values


def ids(name: str) -> Column:
    """The values of lists of whole numbers, for `lists`."""
    return numbers(name, "i8", f"{name}.total")


def texts(name: str) -> Column:
    """The values of lists of texts or byte strings, for `lists`."""
    return octets(name, f"{name}.total")


class Table:
    """Columns in the order in which they lie."""

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

    def write(self, values: Mapping[str, Any]) -> bytes:
        """`values` by column.

        Raises:
            InternalError: a column is missing or has another shape than the table says.
        """
        sizes: dict[str, int] = {}  # in the order of `self._sizes`: that of the columns
        parts, end = [b""], self._head.size
        for each in self._columns:
            content, shape = each.encode(values[each.name])
            self._bind(sizes, each, shape)
            padding = _PADDING[-end % _ALIGNMENT]
            parts += (padding, content)
            end += len(padding) + len(content)
        parts[0] = self._head.pack(*sizes.values())
        return b"".join(parts)

    def read(self, record: memoryview, start: int) -> tuple[dict[str, Any], int]:
        """Values by column, and where the table ends that begins at `start`. Arrays copy nothing: they live as long as
        the record's memory.

        Raises:
            ValueError: the record is shorter than the table's own sizes say.
        """
        end = start + self._head.size
        if len(record) < end:
            raise ValueError(f"{len(record) - start} bytes have no room for the sizes of a {self._name}")
        sizes = dict(zip(self._sizes, self._head.unpack_from(record, start), strict=True))
        values = {}
        for each in self._columns:
            shape = tuple([sizes[extent] if isinstance(extent, str) else extent for extent in each.shape])
            first = end + (start - end) % _ALIGNMENT
            end = first + math.prod(shape) * each.dtype.itemsize
            if end > len(record):
                raise ValueError(f"{each.name} {shape} ends at {end} of {len(record)} bytes")
            values[each.name] = each.decode(record[first:end], shape)
        return values, end

    def _bind(self, sizes: dict[str, int], each: Column, shape: Shape) -> None:
        if len(shape) != len(each.shape):
            raise InternalError(f"{each.name} of a {self._name} has the shape {shape}, not {each.shape}")
        for extent, found in zip(each.shape, shape, strict=True):
            expected = extent if isinstance(extent, int) else sizes.setdefault(extent, found)
            if expected != found:
                raise InternalError(f"{each.name} of a {self._name} has the shape {shape}, {extent} is {expected}")


class Record:
    """Tables one behind the other, each of which may be absent."""

    def __init__(self, *tables: Table) -> None:
        self._tables = tables

    @property
    def layout(self) -> str:
        """All that both ends must have alike, as text."""
        return "\n".join(table.layout for table in self._tables)

    def write(self, *values: Mapping[str, Any] | None) -> bytes:
        """Values of the tables by column, None for a table that is left out. Raises InternalError as `Table.write`."""
        present, parts = 0, [b""]
        for number, (table, given) in enumerate(zip(self._tables, values, strict=True)):
            if given is not None:
                present |= 1 << number
                content = table.write(given)
                parts += (content, _PADDING[-len(content) % _ALIGNMENT])
        parts[0] = _PRESENT.pack(present)
        return b"".join(parts)

    def read(self, record: RecordBytes) -> list[dict[str, Any] | None]:
        """What `write` was given; arrays live as long as the record's memory.

        Raises:
            ValueError: the record is shorter or longer than its own sizes say.
        """
        if len(record) < _PRESENT.size:
            raise ValueError(f"{len(record)} bytes are no record")
        (present,), view, end = _PRESENT.unpack_from(record, 0), memoryview(record), _PRESENT.size
        found: list[dict[str, Any] | None] = []
        for number, table in enumerate(self._tables):
            values = None
            if present >> number & 1:
                values, end = table.read(view, end)
                end += -end % _ALIGNMENT
            found.append(values)
        if end != len(record) or present >> len(self._tables):
            raise ValueError(f"a record of {len(record)} bytes ends at {end}")
        return found


def put_lists(name: str, values: Sequence[Sequence[object]]) -> dict[str, object]:
    """The values of the columns that `lists` declared."""
    return {f"{name}.lengths": [len(value) for value in values], name: [item for value in values for item in value]}


def get_lists(values: Mapping[str, Any], name: str) -> list[tuple[Any, ...]]:
    """What `put_lists` was given. Raises ValueError when the lengths are not those of the values."""
    whole = values[name]
    return [tuple(whole[start:end]) for start, end in _spans(values, name)]


def put_texts(name: str, texts: Sequence[str]) -> dict[str, object]:
    """`put_lists` of texts in UTF-8, in columns of bytes."""
    return put_bytes(name, [text.encode() for text in texts])


def get_texts(values: Mapping[str, Any], name: str) -> list[str]:
    """What `put_texts` was given. Raises ValueError as `get_lists` does, and for what is not UTF-8."""
    return [text.decode() for text in get_bytes(values, name)]


def put_bytes(name: str, values: Sequence[bytes]) -> dict[str, object]:
    """`put_lists` of byte strings, in columns of bytes."""
    return {f"{name}.lengths": [len(value) for value in values], name: b"".join(values)}


def get_bytes(values: Mapping[str, Any], name: str) -> list[bytes]:
    """What `put_bytes` was given. Raises ValueError as `get_lists` does."""
    whole: bytes = values[name]
    return [whole[start:end] for start, end in _spans(values, name)]


def check_counts(counts: Sequence[int], total: int, name: str) -> None:
    """Raises ValueError when they do not add up to `total`, or one is below 0."""
    if min(counts, default=0) < 0 or sum(counts) != total:
        raise ValueError(f"{name}: {sum(counts)} in all, {total} are there")


def refuse_negative(lowest: Mapping[str, int]) -> None:
    """`lowest`: the lowest number of each column. Raises ValueError naming the first that is below 0."""
    for name, value in lowest.items():
        if value < 0:
            raise ValueError(f"{name} {value}, below 0")


def spread(entries: Iterable[tuple[int, T]], count: int) -> tuple[T | None, ...]:
    """`count` places, those of the entries (place, value) filled and the others None.

    Raises:
        ValueError: places do not go up, or are none of these.
    """
    filled: list[T | None] = [None] * count
    last = -1
    for place, value in entries:
        if not last < place < count:
            raise ValueError(f"an entry for place {place} after {last}, of {count}")
        filled[place], last = value, place
    return tuple(filled)


def _spans(values: Mapping[str, Any], name: str) -> list[tuple[int, int]]:
    lengths = values[f"{name}.lengths"]
    check_counts(lengths, len(values[name]), name)
    return list(pairwise(accumulate(lengths, initial=0)))
