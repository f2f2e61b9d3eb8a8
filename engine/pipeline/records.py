"""The record of a packet: a batch for the next stage, the result of the last stage, or an error.

Records are msgspec structs in MessagePack. Most of their fields are the engine's own dataclasses,
so a new field of `SamplingParams` or `SpecRow` needs no change here. Arrays are encoded as their
bytes. A truncated or mistyped record raises while it is decoded. `unpack_batch` and `unpack_result`
check what types cannot express: counts, signs, and whether the record fits the tensors of its
packet.

Stage 0 decides which requests take part and sends that with every batch. Later stages keep only
their pools between packets. The last stage also keeps the output of requests whose penalties or
grammar need it, and batches bring the changes.
"""

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec
import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from engine.contracts.model import StageOutput
from engine.core.batch import DataShare, ForwardBatch, ForwardMode, SamplingRow, ScoringRow
from engine.core.draft_trees import SpecInfo, SpecRow, Verified
from engine.core.request import SampledToken
from engine.core.state_rows import StateRow
from engine.pipeline.channel import FrameBytes, Packet, PacketKind, PartPiece
from engine.pipeline.frames import SCHEMA
from engine.sampling.sampler import Scores
from runtime.errors import InternalError

MAX_ERROR_BYTES = 4096
_PART = struct.Struct("<I")  # number of the exchange within its batch

Count = Annotated[int, Meta(ge=0)]
RecordT = TypeVar("RecordT")


class SpecRecord(msgspec.Struct, array_like=True, frozen=True):
    """A `SpecInfo`. `token_ids` is [T] int64."""

    token_ids: memoryview
    rows: tuple[SpecRow, ...]


class BatchRecord(msgspec.Struct, array_like=True, frozen=True):
    """A `ForwardBatch` and the list of the tensors in its packet.

    Legend: R rows, T tokens, P pages of the longest row. Arrays are decoded as views into the
    packet. The tensors of the packet are the hidden states, the selected keys and the auxiliary
    hidden states of `aux_layers`, in this order, each if the record lists it.

        positions    [T] int64
        page_tables  [R, P] int32
        slot_ids     [R] int32
        token_ids    [T] int64 for another rank of stage 0, else None
        sampling, scoring, states, adapters  per row, as in `ForwardBatch`
    """

    mode: ForwardMode
    has_hidden: bool
    has_selected_keys: bool
    aux_layers: tuple[Count, ...]
    request_keys: tuple[int, ...]
    query_lens: tuple[Count, ...]
    context_lens: tuple[Count, ...]
    num_pages: Count
    positions: memoryview
    page_tables: memoryview
    slot_ids: memoryview
    token_ids: memoryview | None
    sampling: tuple[SamplingRow | None, ...]
    scoring: tuple[ScoringRow | None, ...]
    states: tuple[StateRow, ...]
    adapters: tuple[str, ...]
    ended_keys: tuple[int, ...]
    shares: tuple[DataShare, ...]
    spec: SpecRecord | None


class StageResult(msgspec.Struct, array_like=True, frozen=True):
    """The last stage's result for a batch.

    tokens    per sampling row, in row order: one each, or as many as `verified` accepted nodes
    verified  per sampling row of a speculating pool: accepted nodes and the next tree
    scores    per scoring row, in row order
    """

    tokens: list[SampledToken]
    verified: list[Verified] = []
    scores: list[Scores] = []


class ErrorRecord(msgspec.Struct, array_like=True, frozen=True):
    """The reason why a stage could not run a batch, in UTF-8."""

    text: bytes


@dataclass(frozen=True)
class StageInput:
    """A batch as a later stage receives it."""

    batch: ForwardBatch
    incoming: StageOutput


_RECORDS = (BatchRecord, StageResult, ErrorRecord)
_ENCODER = msgspec.msgpack.Encoder()
_BATCHES = msgspec.msgpack.Decoder(BatchRecord)
_RESULTS = msgspec.msgpack.Decoder(StageResult)
_ERRORS = msgspec.msgpack.Decoder(ErrorRecord)


def layout_digest(records: Sequence[type[msgspec.Struct]] = _RECORDS, schema: int = SCHEMA) -> str:
    """Return a digest of the layout that both ends of a link must share.

    It covers the frame's schema, and every field of the records with its name, type and place.
    """
    places = [record.__struct_fields__ for record in records]  # array types have no field names
    types = msgspec.json.schema_components(records)
    text = json.dumps([schema, places, _without_prose(types)], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _without_prose(schema: object) -> object:
    """Return a JSON schema without docstrings, which may differ between releases."""
    if isinstance(schema, Mapping):
        return {key: _without_prose(value) for key, value in schema.items() if key != "description"}
    return (
        [_without_prose(value) for value in schema] if isinstance(schema, list | tuple) else schema
    )


LAYOUT = layout_digest()
"""Layout digest of this release, compared when a stage joins a pool: releases may differ in it."""


def pack_batch(sequence: int, batch: ForwardBatch, output: StageOutput) -> Packet:
    """Return the packet that the next stage needs to run its layers on the batch."""
    return _pack(sequence, batch, output, None)


def pack_input(sequence: int, batch: ForwardBatch) -> Packet:
    """Return the packet that another rank of stage 0 needs to run its part of the layers."""
    return _pack(sequence, batch, StageOutput(), batch.token_ids)


def _pack(
    sequence: int, batch: ForwardBatch, output: StageOutput, token_ids: Tensor | None
) -> Packet:
    aux_layers = sorted(output.aux_hidden)
    tensors = [tensor for tensor in (output.hidden, output.selected_keys) if tensor is not None]
    tensors += [output.aux_hidden[layer_id] for layer_id in aux_layers]
    spec = batch.spec_info if isinstance(batch.spec_info, SpecInfo) else None
    record = BatchRecord(
        mode=batch.mode,
        has_hidden=output.hidden is not None,
        has_selected_keys=output.selected_keys is not None,
        aux_layers=tuple(aux_layers),
        request_keys=batch.request_keys,
        query_lens=batch.query_lens,
        context_lens=batch.context_lens,
        num_pages=batch.page_tables.shape[1],
        positions=_octets(batch.positions),
        page_tables=_octets(batch.page_tables),
        slot_ids=_octets(batch.slot_ids),
        token_ids=None if token_ids is None else _octets(token_ids),
        sampling=batch.sampling,
        scoring=batch.scoring,
        states=batch.states,
        adapters=batch.adapters,
        ended_keys=batch.ended_keys,
        shares=batch.shares,
        spec=None if spec is None else SpecRecord(_octets(spec.token_ids), spec.rows),
    )
    return Packet(_ENCODER.encode(record), tuple(tensors), PacketKind.BATCH, sequence)


def unpack_batch(packet: Packet) -> StageInput:
    """Return the batch of a packet.

    Raises:
        InternalError: the record is malformed, or does not fit the packet's tensors.
    """
    record = _decode(_BATCHES, packet)
    try:
        batch = _batch_of(record)
        return StageInput(batch, _incoming(record, batch.num_tokens, packet.tensors))
    except ValueError as error:
        raise _malformed(packet, error) from error


def pack_result(
    sequence: int,
    tokens: Sequence[SampledToken],
    verified: Sequence[Verified] = (),
    scores: Sequence[Scores] = (),
) -> Packet:
    """Return the packet of a result; arguments as the fields of `StageResult`."""
    record = _ENCODER.encode(StageResult(list(tokens), list(verified), list(scores)))
    return Packet(record, kind=PacketKind.RESULT, sequence=sequence)


def unpack_result(packet: Packet) -> StageResult:
    """Return the result of a packet.

    Raises:
        InternalError: the record is malformed.
    """
    return _decode(_RESULTS, packet)


def pack_error(sequence: int, text: str) -> Packet:
    """Return the packet of a batch that failed. Text beyond `MAX_ERROR_BYTES` is cut."""
    record = _ENCODER.encode(ErrorRecord(text.encode(errors="replace")[:MAX_ERROR_BYTES]))
    return Packet(record, kind=PacketKind.ERROR, sequence=sequence)


def unpack_error(packet: Packet) -> str:
    """Return the text of an error.

    Raises:
        InternalError: the record is malformed.
    """
    return _decode(_ERRORS, packet).text.decode(errors="replace")


def pack_piece(piece: PartPiece) -> Packet:
    """Return the packet that a rank sends to the others of its stage."""
    return Packet(_PART.pack(piece.number) + piece.data, (), piece.kind, piece.sequence)


def unpack_piece(packet: Packet, into: memoryview) -> PartPiece:
    """Return a piece with a copy of its bytes, in `into` if they fit it exactly.

    Raises:
        InternalError: the record is malformed.
    """
    if len(packet.record) < _PART.size or packet.tensors:
        raise InternalError(
            f"malformed part in frame {packet.sequence}: {len(packet.record)} bytes and "
            f"{len(packet.tensors)} tensors"
        )
    data = memoryview(packet.record)[_PART.size :]
    own = into if len(into) == len(data) else memoryview(bytearray(len(data)))
    own[:] = data
    return PartPiece(packet.kind, packet.sequence, _PART.unpack_from(packet.record)[0], own)


def _decode(decoder: "msgspec.msgpack.Decoder[RecordT]", packet: Packet) -> RecordT:
    try:
        return decoder.decode(packet.record)
    except (msgspec.MsgspecError, ValueError) as error:
        raise _malformed(packet, error) from error


def _malformed(packet: Packet, error: Exception) -> InternalError:
    return InternalError(
        f"malformed {packet.kind.name.lower()} in frame {packet.sequence}: {error}"
    )


def _batch_of(record: BatchRecord) -> ForwardBatch:
    """Return the batch of a record.

    Raises:
        ValueError: its parts do not fit each other.
    """
    num_rows = len(record.request_keys)
    positions = _array("positions", record.positions, np.int64)
    num_tokens = len(positions)
    for name in ("query_lens", "context_lens", "sampling"):
        _check_length(name, len(getattr(record, name)), num_rows)
    for name in ("scoring", "states", "adapters"):
        _check_length(name, len(getattr(record, name)) or num_rows, num_rows)
    _check_length("query_lens add up to", sum(record.query_lens), num_tokens)
    slot_ids = _array("slot_ids", record.slot_ids, np.int32)
    _check_length("slot_ids", len(slot_ids), num_rows)
    page_tables = _array("page_tables", record.page_tables, np.int32)
    _check_length("page_tables", len(page_tables), num_rows * record.num_pages)
    token_ids = torch.empty(0, dtype=torch.int64) if not num_tokens else None
    if record.token_ids is not None:
        token_ids = _array("token_ids", record.token_ids, np.int64)
        _check_length("token_ids", len(token_ids), num_tokens)
    for row in record.sampling:
        if row is not None and row.output is not None:
            _refuse_negative("kept", row.output.kept)
    for state in record.states:
        _refuse_negative("resumed_slot", state.resumed_slot)
    return ForwardBatch(
        mode=record.mode,
        request_keys=record.request_keys,
        query_lens=record.query_lens,
        context_lens=record.context_lens,
        token_ids=token_ids,
        positions=positions,
        page_tables=page_tables.view(num_rows, record.num_pages),
        slot_ids=slot_ids,
        sampling=record.sampling,
        scoring=record.scoring,
        states=record.states,
        adapters=record.adapters,
        ended_keys=record.ended_keys,
        spec_info=None
        if record.spec is None
        else _spec_of(record.spec, record.query_lens, num_tokens),
        shares=record.shares,
    )


def _spec_of(record: SpecRecord, query_lens: Sequence[int], num_tokens: int) -> SpecInfo:
    """Return the trees that a batch verifies.

    Raises:
        ValueError: the trees do not fit the batch's rows.
    """
    token_ids = torch.from_numpy(np.frombuffer(record.token_ids, np.int64).copy())
    _check_length("spec.token_ids", len(token_ids), num_tokens)
    _check_length("spec.rows", len(record.rows), len(query_lens))
    for length, row in zip(query_lens, record.rows, strict=True):
        _refuse_negative("scratch", row.scratch)
        if row.parents:
            _check_length("parents", len(row.parents), length)
            if any(not -1 <= parent < node for node, parent in enumerate(row.parents)):
                raise ValueError(f"parents {row.parents[:8]}: each must come before its child")
    return SpecInfo(token_ids, record.rows)


def _incoming(record: BatchRecord, num_tokens: int, tensors: Sequence[Tensor]) -> StageOutput:
    """Return the output of the previous stage.

    Raises:
        ValueError: the tensors differ from those that the record lists.
    """
    for tensor in tensors:
        if not tensor.dim() or len(tensor) != num_tokens:
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} for {num_tokens} tokens")
    _check_length(
        "tensors",
        len(tensors),
        record.has_hidden + record.has_selected_keys + len(record.aux_layers),
    )
    computed = list(tensors)
    hidden = computed.pop(0) if record.has_hidden else None
    selected_keys = computed.pop(0) if record.has_selected_keys else None
    return StageOutput(
        hidden=hidden,
        aux_hidden=dict(zip(record.aux_layers, computed, strict=True)),
        selected_keys=selected_keys,
    )


def _octets(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().numpy().tobytes())


def _array(name: str, octets: FrameBytes, dtype: type[np.int32] | type[np.int64]) -> Tensor:
    """Return the numbers as a tensor with its own memory.

    Raises:
        ValueError: a number is negative or truncated.
    """
    array = np.frombuffer(octets, dtype).copy()
    if array.size:
        _refuse_negative(name, int(array.min()))
    return torch.from_numpy(array)


def _check_length(name: str, found: int, expected: int) -> None:
    if found != expected:
        raise ValueError(f"{name}: {found}, expected {expected}")


def _refuse_negative(name: str, value: int) -> None:
    if value < 0:
        raise ValueError(f"{name}: {value} is below 0")
