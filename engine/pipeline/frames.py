"""Frames between the stages of a pool: one header, a table of the tensors, the record, and the tensors' bytes where
they travel within the frame.

    header   <4s BBB x H xx I Q Q   magic, schema, kind, route, tensors, bytes of the record, sequence, digest
    tensors  <BB xx 3I each         dtype code, dims, first three extents (0 where absent)
    record   see `engine/pipeline/records.py`
    run      the tensors one after the other, each at a multiple of 64 from its start, which is one, too

The digest is XXH3-64 of everything behind the header, keyed by the header before the digest: whatever of a frame was
changed on its way, also by the sender's or the receiver's memory, is noticed before anything is read from it. Tensors
beside their frame are not in it, because no host sees them: there the links' own checks protect them (a CRC with replay
on NVLink, PCIe and InfiniBand; TCP's checksum where NCCL or gloo use sockets), and the frame's digest protects their
number, dtypes and shapes.

The tensors of one packet lie in one flat run of bytes: so they are one message between devices, and one copy between
host memory and a device.
"""

import math
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from engine.pipeline.channel import Packet, PacketKind
from runtime.errors import IntegrityError, InternalError

_HEADER = struct.Struct("<4sBBBxHxxIQQ")
_DIGEST = struct.Struct("<Q")
_KEYED_BYTES = _HEADER.size - _DIGEST.size
_ENTRY = struct.Struct("<BBxx3I")
_MAGIC, SCHEMA = b"BATN", 11
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int32)
_ALIGNMENT = 64
_MAX_DIMS = 3


class TensorRoute(IntEnum):
    """How the tensors of a packet travel."""

    WITHIN = 1  # behind the record, in the same message
    BESIDE = 2  # over a link, from device to device


class TensorSpec(NamedTuple):
    """What the head of a frame says of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Frame(NamedTuple):
    """A frame as it arrived; `run` is empty when the tensors travel beside it. Both views live as long as its
    memory."""

    kind: PacketKind
    sequence: int
    route: TensorRoute
    specs: tuple[TensorSpec, ...]
    record: memoryview
    run: memoryview


def specs_of(tensors: Sequence[Tensor]) -> tuple[TensorSpec, ...]:
    """In the order of the tensors."""
    return tuple([TensorSpec(tensor.dtype, tuple(tensor.shape)) for tensor in tensors])


def run_bytes(specs: Sequence[TensorSpec]) -> int:
    """Length of the run that holds such tensors."""
    return sum([_aligned(spec.num_bytes) for spec in specs])


def write(route: TensorRoute, packet: Packet) -> bytearray:
    """One contiguous frame; the tensors' bytes are in it on the route WITHIN."""
    specs = specs_of(packet.tensors)
    start = _HEADER.size + _ENTRY.size * len(specs)
    end = start + len(packet.record)
    run = _aligned(end) if route is TensorRoute.WITHIN and specs else end
    frame = bytearray(run + (run_bytes(specs) if route is TensorRoute.WITHIN else 0))
    for place, spec in enumerate(specs):
        extents = (*spec.shape, *(0,) * _MAX_DIMS)[:_MAX_DIMS]
        _ENTRY.pack_into(frame, _HEADER.size + place * _ENTRY.size, _DTYPES.index(spec.dtype), len(spec.shape),
                         *extents)
    view, at = memoryview(frame), run
    view[start:end] = packet.record
    for tensor, spec in zip(packet.tensors, specs, strict=True) if route is TensorRoute.WITHIN else ():
        view[at:at + spec.num_bytes] = tensor.reshape(-1).view(torch.uint8).cpu().numpy().data
        at += _aligned(spec.num_bytes)
    _HEADER.pack_into(frame, 0, _MAGIC, SCHEMA, packet.kind, route, len(specs), len(packet.record), packet.sequence, 0)
    _DIGEST.pack_into(frame, _KEYED_BYTES, digest_of(frame))
    return frame


def read(data: memoryview) -> Frame:
    """
    Raises:
        IntegrityError: these are not the bytes that were sent, or not a frame of this schema. Names the frame by its
            sequence number, if there is one.
        InternalError: they were sent so, and make no sense.
    """
    if len(data) < _HEADER.size:
        raise IntegrityError(f"{len(data)} bytes are not a frame")
    magic, schema, kind, route, count, record_bytes, sequence, digest = _HEADER.unpack_from(data, 0)
    if magic != _MAGIC or schema != SCHEMA:
        raise IntegrityError(f"{len(data)} bytes are not a frame of schema {SCHEMA}: magic {magic!r}, schema {schema}")
    if digest_of(data) != digest:
        raise IntegrityError(f"frame {sequence} of {len(data)} bytes: what arrived is not what was sent (digest)")
    try:
        start = _HEADER.size + _ENTRY.size * count
        specs = tuple([_spec(*entry) for entry in _ENTRY.iter_unpack(data[_HEADER.size:start])])
        end = start + record_bytes
        is_within = TensorRoute(route) is TensorRoute.WITHIN and count > 0
        run = _aligned(end) if is_within else end
        if len(data) != run + (run_bytes(specs) if is_within else 0):
            raise ValueError(f"a record of {record_bytes} bytes and {count} tensors are not as long")
        return Frame(PacketKind(kind), sequence, TensorRoute(route), specs, data[start:end], data[run:])
    except (struct.error, ValueError, IndexError) as error:
        raise InternalError(f"frame {sequence} of {len(data)} bytes is malformed: {error}") from error


def digest_of(frame: bytearray | memoryview) -> int:
    """XXH3-64 of a whole frame, as its header holds it."""
    view = memoryview(frame)
    return xxhash.xxh3_64_intdigest(view[_HEADER.size:], seed=xxhash.xxh3_64_intdigest(view[:_KEYED_BYTES]))


def fill(run: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy the tensors into their run [run_bytes] uint8, on whatever devices they lie."""
    at = 0
    for tensor in tensors:
        num_bytes = tensor.numel() * tensor.dtype.itemsize
        run[at:at + num_bytes].view(tensor.dtype).copy_(tensor.reshape(-1))
        at += _aligned(num_bytes)


def cut(run: Tensor, specs: Sequence[TensorSpec]) -> tuple[Tensor, ...]:
    """The tensors in a run, as views."""
    tensors, at = [], 0
    for spec in specs:
        end = at + spec.num_bytes
        whole = run if end - at == len(run) else run[at:end]  # one tensor without padding, as a rule: no view needed
        tensors.append(whole.view(spec.dtype).view(spec.shape))
        at = _aligned(end)
    return tuple(tensors)


def _spec(code: int, dims: int, *extents: int) -> TensorSpec:
    if dims > _MAX_DIMS or any(extents[dims:]) or (0 in extents[:dims] and max(extents) >= 1 << 31):
        raise ValueError(f"a tensor of {dims} dimensions {extents}")
    return TensorSpec(_DTYPES[code], extents[:dims])


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
