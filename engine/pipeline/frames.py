"""Frames between the stages of a pool.

A frame has a header, a table of the tensors, the record, and the bytes of tensors that travel
within the frame.

    head     filled in by the channel, which defines its length and identifies the frame by it
    header   <4s BBB x H xx I Q     magic, schema, kind, route, tensors, record bytes, sequence
    tensors  <BB xx 3I each         dtype code, dims, first three extents (0 where absent)
    record   see `engine/pipeline/records.py`
    run      the tensors in order; the run and each tensor begin at a multiple of 64

The channel between processes authenticates the whole frame (`transfer/transport/forming.py`). A
frame that was changed on its way, or comes from elsewhere, is detected before it is parsed. Tensors
beside their frame are not in it, because no host sees them. The links' own checks protect them from
damage: a CRC with replay on NVLink, PCIe and InfiniBand, and TCP's checksum if NCCL or Gloo use
sockets. The frame protects their number, dtypes and shapes.

The tensors of one packet are in one flat run of bytes. So they are one message between devices, and
one copy between host memory and a device.
"""

import ctypes
import functools
import itertools
import math
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from engine.pipeline.channel import Packet, PacketKind
from runtime.errors import IntegrityError, InternalError

_HEADER = struct.Struct("<4sBBBxHxxIQ")
_ENTRY = struct.Struct("<BBxx3I")
_MAGIC = b"BATN"
SCHEMA = 13
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int32)
_ALIGNMENT = 64
_MAX_DIMS = 3
_MAX_LAYOUTS = 256


class TensorRoute(IntEnum):
    """The route of a packet's tensors."""

    WITHIN = 1  # after the record, in the same message
    BESIDE = 2  # over a link, from device to device


_KINDS = {kind.value: kind for kind in PacketKind}
_ROUTES = {route.value: route for route in TensorRoute}


class TensorSpec(NamedTuple):
    """The dtype and shape of a tensor, as the frame's table lists them."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Frame(NamedTuple):
    """A received frame. `run` is empty if the tensors travel beside it.

    `record` and `run` are views of the frame's memory.
    """

    kind: PacketKind
    sequence: int
    route: TensorRoute
    specs: tuple[TensorSpec, ...]
    record: memoryview
    run: memoryview


class _Layout(NamedTuple):
    """The tensors of a frame: their table, their places in the run, and the run's bytes."""

    specs: tuple[TensorSpec, ...]
    table: bytes
    places: tuple[int, ...]
    run_bytes: int


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """Return the length in bytes of the run that holds the tensors."""
    return _layout_of(tensors).run_bytes


def run_bytes(specs: Sequence[TensorSpec]) -> int:
    """Return the length in bytes of the run that holds such tensors."""
    return sum([_aligned(spec.num_bytes) for spec in specs])


def write(route: TensorRoute, packet: Packet, head_bytes: int = 0) -> bytearray:
    """Return one contiguous frame, with the tensors' bytes in it on the route WITHIN.

    The first `head_bytes` belong to the channel, and offsets count from their end.
    """
    layout = _layout_of(packet.tensors)
    table = head_bytes + _HEADER.size
    start = table + len(layout.table)
    end = start + len(packet.record)
    is_within = route is TensorRoute.WITHIN and bool(layout.specs)
    run = head_bytes + _aligned(end - head_bytes) if is_within else end
    frame = bytearray(run + layout.run_bytes if is_within else end)
    _HEADER.pack_into(
        frame,
        head_bytes,
        _MAGIC,
        SCHEMA,
        packet.kind,
        route,
        len(layout.specs),
        len(packet.record),
        packet.sequence,
    )
    frame[table:start] = layout.table
    frame[start:end] = packet.record
    if is_within:
        for tensor, place in zip(packet.tensors, layout.places, strict=True):
            if num_bytes := tensor.nbytes:
                _copy_to(frame, run + place, tensor, num_bytes)
    return frame


def read(data: memoryview) -> Frame:
    """Parse a frame without the channel's head.

    Raises:
        IntegrityError: this is not a frame of this schema.
        InternalError: the frame is malformed as it was sent. The message names its sequence number.
    """
    if len(data) < _HEADER.size:
        raise IntegrityError(f"{len(data)} bytes are not a frame")
    magic, schema, kind, route, count, record_bytes, sequence = _HEADER.unpack_from(data, 0)
    if magic != _MAGIC or schema != SCHEMA:
        raise IntegrityError(
            f"{len(data)} bytes are not a frame of schema {SCHEMA}: magic {magic!r}, schema {schema}"
        )
    try:
        start = _HEADER.size + _ENTRY.size * count
        layout = _listed(bytes(data[_HEADER.size : start]))
        end = start + record_bytes
        is_within = route == TensorRoute.WITHIN and count > 0
        run = _aligned(end) if is_within else end
        if len(data) != run + (layout.run_bytes if is_within else 0):
            raise ValueError(
                f"a record of {record_bytes} bytes and {count} tensors have another length"
            )
        return Frame(
            _KINDS[kind], sequence, _ROUTES[route], layout.specs, data[start:end], data[run:]
        )
    except (struct.error, ValueError, LookupError) as error:
        raise InternalError(
            f"frame {sequence} of {len(data)} bytes is malformed: {error}"
        ) from error


def fill(run: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy tensors of any device into their run, [run_bytes] uint8."""
    at = 0
    for tensor in tensors:
        num_bytes = tensor.numel() * tensor.dtype.itemsize
        run[at : at + num_bytes].view(tensor.dtype).copy_(tensor.reshape(-1))
        at += _aligned(num_bytes)


def copied(frame: Frame) -> tuple[Tensor, ...]:
    """Return copies of the tensors within the frame, each in memory of its own."""
    run = memoryview(bytearray(frame.run)) if frame.run.readonly else frame.run
    tensors = []
    at = 0
    for spec in frame.specs:
        if spec.num_bytes:
            count = spec.num_bytes // spec.dtype.itemsize
            values = torch.frombuffer(run, dtype=spec.dtype, count=count, offset=at)
            tensors.append((values.view(*spec.shape) if spec.shape else values.view(())).clone())
        else:
            tensors.append(torch.empty(spec.shape, dtype=spec.dtype))
        at += _aligned(spec.num_bytes)
    return tuple(tensors)


def cut(run: Tensor, specs: Sequence[TensorSpec]) -> tuple[Tensor, ...]:
    """Return the tensors in a run, as views."""
    tensors = []
    at = 0
    for spec in specs:
        end = at + spec.num_bytes
        # Usually there is one tensor without padding, which needs no slice.
        whole = run if end - at == len(run) else run[at:end]
        tensors.append(whole.view(spec.dtype).view(spec.shape))
        at = _aligned(end)
    return tuple(tensors)


def _layout_of(tensors: Sequence[Tensor]) -> _Layout:
    return _laid_out(tuple([(tensor.dtype, tensor.shape) for tensor in tensors]))


# The stages of a pool exchange a few kinds of packets, in a few numbers of rows.
@functools.lru_cache(_MAX_LAYOUTS)
def _laid_out(shapes: tuple[tuple[torch.dtype, torch.Size], ...]) -> _Layout:
    specs = tuple([TensorSpec(dtype, tuple(shape)) for dtype, shape in shapes])
    table = b"".join(
        _ENTRY.pack(
            _DTYPES.index(spec.dtype),
            len(spec.shape),
            *(*spec.shape, *(0,) * _MAX_DIMS)[:_MAX_DIMS],
        )
        for spec in specs
    )
    return _placed(specs, table)


@functools.lru_cache(_MAX_LAYOUTS)
def _listed(table: bytes) -> _Layout:
    """Return the tensors that a frame's table lists; raise ValueError if it is malformed."""
    return _placed(tuple([_spec(*entry) for entry in _ENTRY.iter_unpack(table)]), table)


def _placed(specs: tuple[TensorSpec, ...], table: bytes) -> _Layout:
    *places, end = itertools.accumulate([_aligned(spec.num_bytes) for spec in specs], initial=0)
    return _Layout(specs, table, tuple(places), end)


def _copy_to(frame: bytearray, at: int, tensor: Tensor, num_bytes: int) -> None:
    """Copy the tensor's bytes into the frame. By ctypes, which is faster than views of torch."""
    dense = tensor.contiguous().cpu()
    ctypes.memmove(
        ctypes.addressof(ctypes.c_char.from_buffer(frame, at)), dense.data_ptr(), num_bytes
    )


def _spec(code: int, dims: int, *extents: int) -> TensorSpec:
    if dims > _MAX_DIMS or any(extents[dims:]) or (0 in extents[:dims] and max(extents) >= 1 << 31):
        raise ValueError(f"a tensor of {dims} dimensions {extents}")
    return TensorSpec(_DTYPES[code], extents[:dims])


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
