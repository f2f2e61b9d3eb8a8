"""Files of the disk cache.

A file holds one rank's part of one page (`Content.PAGE`), or of the recurrent state after it
(`Content.STATE`). It is in the safetensors format, with one tensor for each layer and kind of cache
in the order of both, and a last one with their authenticators. The rest of the file follows from
the block's name, the model's caches and the part. So a reader knows all bytes in front of the
tensors, and interprets none of them: a file that differs there is not used.

The authenticators detect damage, and files in the place of others. They do not detect forgery,
because their keys are derived from the names alone.
"""

import hmac
import json
import os
import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Self

from engine.core.layer_range import LayerRange, TensorRank
from engine.memory.layout import CacheKind, CacheSpec, PoolGeometry, travelling
from runtime.digests import NAME_BYTES
from transfer.transport.authenticator import KEY_BYTES, SEAL_BYTES, Authenticator, derived

FORMAT = "baton cache 1"
SEALS = "seals"
_NO_NAME = bytes(NAME_BYTES).hex().encode()
_DTYPES = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "int64": "I64",
    "int32": "I32",
}
FilePath = str | Path
_PART = re.compile(r"(\d+)-(\d+)\.(\d+)of(\d+)")
_LENGTH_BYTES = 8
_MAX_BUFFERS = 512  # of one system call; Linux allows 1024


class Content(StrEnum):
    """The content of a file, as its name begins."""

    PAGE = "page"
    STATE = "state"

    def has(self, kind: CacheKind) -> bool:
        """Return whether files of this content have this kind of cache."""
        return kind.is_paged if self is Content.PAGE else kind.is_state


@dataclass(frozen=True)
class StagePart:
    """The layers of a stage, and the rank's part of them."""

    layers: LayerRange
    tensor: TensorRank

    @classmethod
    def of(cls, geometry: PoolGeometry) -> Self:
        return cls(geometry.layers, geometry.tensor)

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the part with this text, or None if there is no such part."""
        found = _PART.fullmatch(text)
        if found is None:
            return None
        start, end, rank, size = map(int, found.groups())
        if start >= end or rank >= size:
            return None
        return cls(LayerRange(start, end), TensorRank(rank, size))

    def __str__(self) -> str:
        return f"{self.layers}.{self.tensor.rank}of{self.tensor.size}"


@dataclass(frozen=True)
class PartLayout:
    """The layout of all files with the same content of the same part.

    `specs` covers the whole model.
    """

    specs: tuple[CacheSpec, ...]
    content: Content
    part: StagePart

    @cached_property
    def of_part(self) -> tuple[CacheSpec, ...]:
        """Return the part's own specs, in the order of the file."""
        return tuple(spec.of_rank(self.part.tensor) for spec in self.of_whole)

    @cached_property
    def of_whole(self) -> tuple[CacheSpec, ...]:
        """Return the specs of the same caches for the whole model, in the same order."""
        return tuple(
            spec
            for spec in sorted(travelling(self.specs), key=lambda each: (each.layer_id, each.kind))
            if spec.layer_id in self.part.layers
            and self.content.has(spec.kind)
            and not (spec.of_draft and self.part.tensor.rank)
        )

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Return the first byte of each tensor after the header, and that of the authenticators."""
        return tuple(accumulate((spec.record_bytes for spec in self.of_part), initial=0))

    def header(self, name: bytes) -> bytes:
        """Return the bytes of a block's file in front of the tensors."""
        return self._header_of_none.replace(_NO_NAME, name.hex().encode(), 1)

    @cached_property
    def _header_of_none(self) -> bytes:
        tensors: dict[str, object] = {
            "__metadata__": {
                "format": FORMAT,
                "content": str(self.content),
                "block": _NO_NAME.decode(),
                "part": str(self.part),
            }
        }
        for spec, start in zip(self.of_part, self.starts, strict=False):
            tensors[_label(spec)] = {
                "dtype": _DTYPES[spec.dtype],
                "shape": spec.record_shape,
                "data_offsets": (start, start + spec.record_bytes),
            }
        end = self.starts[-1]
        tensors[SEALS] = {
            "dtype": "U8",
            "shape": (len(self.of_part), SEAL_BYTES),
            "data_offsets": (end, end + self.num_seal_bytes),
        }
        text = json.dumps(tensors, separators=(",", ":")).encode()
        text = text.ljust(-(-len(text) // _LENGTH_BYTES) * _LENGTH_BYTES)
        return len(text).to_bytes(_LENGTH_BYTES, "little") + text

    @property
    def num_seal_bytes(self) -> int:
        return len(self.of_part) * SEAL_BYTES

    def seals(self, name: bytes, records: Sequence[memoryview]) -> bytes:
        """Return the authenticators of the tensors with these bytes, in the order of the file."""
        key = derived(
            bytes(KEY_BYTES),
            "baton disk",
            name,
            str(self.content).encode(),
            str(self.part).encode(),
        )
        authenticator = Authenticator(key)
        return b"".join(
            authenticator.seal(number, record, _label(spec).encode())
            for number, (spec, record) in enumerate(zip(self.of_part, records, strict=True))
        )


def write_part(
    path: FilePath, layout: PartLayout, name: bytes, records: Sequence[memoryview]
) -> int:
    """Write a file with these tensors' bytes, whole or not at all; return its size.

    Only its user may read it.

    Raises:
        OSError: it cannot be written.
    """
    header, seals = memoryview(layout.header(name)), memoryview(layout.seals(name, records))
    pieces = [header, *records, seals]
    folder, file_name = os.path.split(path)
    # Random, because processes in several containers have the same ids.
    temporary = f"{folder}/.{file_name}.{secrets.token_hex(8)}"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            _write_all(descriptor, pieces)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    return sum(map(len, pieces))


def read_part(
    path: FilePath, layout: PartLayout, name: bytes, records: Sequence[memoryview]
) -> bool:
    """Read a file's tensors into `records`; return whether it is intact.

    If it is not, or cannot be read, their bytes are undefined.
    """
    header = layout.header(name)
    found = bytearray(len(header))
    seals = bytearray(layout.num_seal_bytes)
    pieces = [memoryview(found), *records, memoryview(seals)]
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            expected = sum(map(len, pieces))
            is_whole = os.fstat(descriptor).st_size == expected and (
                _read_all(descriptor, pieces) == expected
            )
        finally:
            os.close(descriptor)
    except OSError:
        return False
    return (
        is_whole
        and found == header
        and hmac.compare_digest(bytes(seals), layout.seals(name, records))
    )


def prefetch_part(path: FilePath) -> None:
    """Have the kernel begin to read a file, if it is there."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)


def _write_all(descriptor: int, pieces: Sequence[memoryview]) -> None:
    """Append the pieces to a file, with one system call if there are few.

    A buffered file would take one for each, which is most of the time.
    """
    for first in range(0, len(pieces), _MAX_BUFFERS):
        some = pieces[first : first + _MAX_BUFFERS]
        count = os.writev(descriptor, some)
        if count < sum(map(len, some)):
            # A call transfers at most 2 GiB, and less than that to a full disk.
            for piece in _unfilled(some, count):
                while len(piece):
                    piece = piece[os.write(descriptor, piece) :]


def _read_all(descriptor: int, pieces: Sequence[memoryview]) -> int:
    """Fill the pieces from the beginning of a file; return the number of bytes that it had."""
    done = 0
    for first in range(0, len(pieces), _MAX_BUFFERS):
        some = pieces[first : first + _MAX_BUFFERS]
        wanted = sum(map(len, some))
        count = os.preadv(descriptor, some, done)
        done += count
        if count < wanted:
            # A call transfers at most 2 GiB, and may be interrupted.
            for piece in _unfilled(some, count):
                while len(piece) and (count := os.preadv(descriptor, [piece], done)):
                    done += count
                    piece = piece[count:]
    return done


def _unfilled(pieces: Sequence[memoryview], done: int) -> list[memoryview]:
    """Return the pieces without their first `done` bytes."""
    rest = []
    for piece in pieces:
        taken = min(done, len(piece))
        done -= taken
        rest.append(piece[taken:])
    return rest


def _label(spec: CacheSpec) -> str:
    return f"layers.{spec.layer_id}.{spec.kind}"
