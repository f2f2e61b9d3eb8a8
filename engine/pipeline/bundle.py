"""Bytes of a packet: a head, a table of its tensors, the frame, and the tensors' bytes where they travel within it.

The tensors of one packet lie in one flat run of bytes, each at a multiple of 64: so they are one message between
devices, and one copy between host memory and a device.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from engine.pipeline.channel import FrameBytes
from runtime.errors import InternalError

_HEAD = struct.Struct("<4sBBHQ")  # magic, schema, route, number of tensors, bytes of the frame
_ENTRY = struct.Struct("<BBxxIQQ")  # dtype code, dims, first three extents (0 where absent)
_MAGIC, _SCHEMA = b"BATP", 1
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int32)
_ALIGNMENT = 64


class Route(IntEnum):
    """How the tensors of a packet travel."""

    WITHIN = 1  # behind the frame, in the same message
    BESIDE = 2  # over a link, from device to device


@dataclass(frozen=True)
class TensorSpec:
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Bundle:
    """A bundle as it arrived; `flat` is empty when the tensors travel beside it. Both views live as long as its
    memory."""

    route: Route
    specs: tuple[TensorSpec, ...]
    frame: memoryview
    flat: memoryview


def specs_of(tensors: Sequence[Tensor]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(tensor.dtype, tuple(tensor.shape)) for tensor in tensors)


def flat_bytes(specs: Sequence[TensorSpec]) -> int:
    """Length of the run that holds such tensors."""
    return sum(_aligned(spec.num_bytes) for spec in specs)


def write(route: Route, frame: FrameBytes, tensors: Sequence[Tensor]) -> bytearray:
    """One contiguous bundle; the tensors' bytes are in it on the route WITHIN."""
    specs = specs_of(tensors)
    start = _HEAD.size + _ENTRY.size * len(specs)
    behind = _aligned(start + len(frame)) if route is Route.WITHIN and specs else start + len(frame)
    bundle = bytearray(behind + (flat_bytes(specs) if route is Route.WITHIN else 0))
    _HEAD.pack_into(bundle, 0, _MAGIC, _SCHEMA, route, len(specs), len(frame))
    for i, spec in enumerate(specs):
        extents = (*spec.shape, 0, 0, 0)[:3]
        _ENTRY.pack_into(bundle, _HEAD.size + i * _ENTRY.size, _DTYPES.index(spec.dtype), len(spec.shape), *extents)
    bundle[start:start + len(frame)] = frame
    if len(bundle) > behind:
        fill(torch.frombuffer(bundle, dtype=torch.uint8, offset=behind), tensors)
    return bundle


def read(data: memoryview) -> Bundle:
    """Raises InternalError: not a bundle of this schema, or shorter than its own table says."""
    try:
        magic, schema, route, count, frame_bytes = _HEAD.unpack_from(data, 0)
        if magic != _MAGIC or schema != _SCHEMA:
            raise InternalError(f"not a packet of schema {_SCHEMA}: magic {magic!r}, schema {schema}")
        start = _HEAD.size + _ENTRY.size * count
        entries = [_ENTRY.unpack_from(data, at) for at in range(_HEAD.size, start, _ENTRY.size)]
        specs = tuple(TensorSpec(_DTYPES[code], tuple(extents[:dims])) for code, dims, *extents in entries)
        end = start + frame_bytes
        within = Route(route) is Route.WITHIN and count > 0
        behind = _aligned(end) if within else end
        flat = data[behind:]
        if len(data) != behind + (flat_bytes(specs) if within else 0):
            raise ValueError(f"{len(data)} bytes for a frame of {frame_bytes} and {count} tensors")
        return Bundle(Route(route), specs, data[start:end], flat)
    except (struct.error, ValueError, IndexError) as error:
        raise InternalError(f"packet of {len(data)} bytes is damaged: {error}") from error


def fill(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy the tensors into their run [flat_bytes] uint8, on whatever devices they lie."""
    at = 0
    for tensor in tensors:
        num_bytes = tensor.numel() * tensor.dtype.itemsize
        flat[at:at + num_bytes].view(tensor.dtype).copy_(tensor.reshape(-1))
        at += _aligned(num_bytes)


def cut(flat: Tensor, specs: Sequence[TensorSpec]) -> tuple[Tensor, ...]:
    """The tensors in a run, as views."""
    tensors, at = [], 0
    for spec in specs:
        tensors.append(flat[at:at + spec.num_bytes].view(spec.dtype).view(spec.shape))
        at += _aligned(spec.num_bytes)
    return tuple(tensors)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
