"""What a packet's record holds: a batch on its way through the stages, the result of the last one, or an error.

Stage 0 decides membership and ships it with every batch; later stages keep nothing between packets but their pools, the
last one also the output of requests whose penalties or grammar need it: batches bring what changed of it. What a stage
computed are the tensors of the same packet. Where a whole number may be absent, -1 stands for that.
"""

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.contracts.model import StageOutput
from engine.core.batch import DataShare, ForwardBatch, ForwardMode, SamplingRow
from engine.core.draft_trees import SpecInfo, TokenTree, Verified
from engine.core.request import DrawnToken, ProblemCause, SamplingParams, TokenLogprobs
from engine.pipeline import row_tables
from engine.pipeline.channel import Packet, PacketKind, PartPiece
from engine.pipeline.frames import SCHEMA
from engine.pipeline.tables import (
    Array,
    Column,
    Record,
    Table,
    check_counts,
    column,
    get_lists,
    get_texts,
    ids,
    lists,
    numbers,
    octets,
    put_lists,
    put_texts,
    refuse_negative,
    spread,
    texts,
    tuples,
)
from engine.sampling.sampler import Scores
from runtime.errors import InternalError

Values = Mapping[str, Any]  # by column
MAX_ERROR_BYTES = 4096
NO_TOKENS = torch.empty(0, dtype=torch.int64)
_MODES = tuple(ForwardMode)


def _pairs(name: str) -> Column:
    return tuples(name, f"{name}.total", token_id="i8", value="f8")


_STEP = Table(
    "step",
    tuples("head", 1, mode="u1", has_hidden="u1", has_selected_keys="u1"),
    numbers("aux_layers", "i4", "aux_layers"),
    tuples("rows", "rows", request_key="i8", query_len="i8", context_len="i8"),
    column("slot_ids", "i4", "rows"),
    column("page_tables", "i4", "rows", "pages"),
    column("positions", "i8", "tokens"),
    numbers("ended_keys", "i8", "ended_keys"),
    column("token_ids", "i8", "token_ids"),  # for a rank of stage 0, else none
    tuples("shares", "shares", tokens="i8", logits="i8"),
)
_DRAWING = Table(  # one entry per row that draws
    "drawing",
    tuples("drawing", "drawing",
           row="i4", temperature="f8", top_k="i8", top_p="f8", min_p="f8", frequency_penalty="f8",
           presence_penalty="f8", repetition_penalty="f8", seed="u8", position="i8", num_top_logprobs="i8",
           banned_before="i8"),
    *lists(_pairs("logit_bias"), per="drawing"),
    *lists(ids("banned"), per="drawing"),
)
_BATCH = Record(_STEP, _DRAWING, row_tables.OUTPUTS, row_tables.SCORING, row_tables.SPEC, row_tables.STATES)


def _token_columns(name: str) -> tuple[Column, ...]:
    return (tuples(name, name, token_id="i8", has_logprobs="u1", logprob="f8", cause="u1"),
            *lists(_pairs(f"{name}.top"), per=name), *lists(texts(f"{name}.problem"), per=name))


_DRAWN = Table("drawn", *_token_columns("drawn"))
_VERIFIED = Table("verified", *lists(ids("accepted"), per="verified"), *lists(ids("tokens"), per="verified"),
                  *lists(ids("parents"), per="verified"))
_SCORED = Table("scored", numbers("counts", "i8", "scoring"), *_token_columns("scored"))
_RESULT = Record(_DRAWN, _VERIFIED, _SCORED)
_ERROR = Record(Table("error", octets("text", "bytes")))
_PART = struct.Struct("<I")  # which exchange of its batch
# Stages that join a pool say how they lay out what goes between them: releases may differ in it.
LAYOUT = hashlib.blake2b("\n".join([str(SCHEMA), *(table.layout for table in (_BATCH, _RESULT, _ERROR))]).encode(),
                         digest_size=6).hexdigest()


@dataclass(frozen=True)
class StageInput:
    """A batch as a later stage gets it."""

    batch: ForwardBatch
    incoming: StageOutput


@dataclass(frozen=True)
class StageResult:
    """What the last stage made of a batch: tokens of the rows that draw, in row order (one each, or as many as
    `verified` accepted nodes), what came of their trees, and the scores of the rows that score."""

    tokens: list[DrawnToken]
    verified: list[Verified]
    scores: list[Scores]


def pack_batch(sequence: int, batch: ForwardBatch, output: StageOutput) -> Packet:
    """What the next stage needs to run its layers on the batch."""
    return _pack(sequence, batch, output, NO_TOKENS)


def pack_input(sequence: int, batch: ForwardBatch) -> Packet:
    """What another rank of stage 0 needs to run its part of the stage's layers on the batch."""
    return _pack(sequence, batch, StageOutput(), NO_TOKENS if batch.token_ids is None else batch.token_ids)


def _pack(sequence: int, batch: ForwardBatch, output: StageOutput, token_ids: Tensor) -> Packet:
    aux_layers = sorted(output.aux_hidden)
    tensors = [tensor for tensor in (output.hidden, output.selected_keys) if tensor is not None]
    tensors += [output.aux_hidden[layer_id] for layer_id in aux_layers]
    spec = batch.spec_info if isinstance(batch.spec_info, SpecInfo) else None
    drawing = [(place, row) for place, row in enumerate(batch.sampling) if row is not None]
    outputs = [(place, row.output) for place, (_, row) in enumerate(drawing) if row.output is not None]
    record = _BATCH.write(
        {
            "head": [(_MODES.index(batch.mode), output.hidden is not None, output.selected_keys is not None)],
            "aux_layers": aux_layers,
            "rows": list(zip(batch.request_keys, batch.query_lens, batch.context_lens, strict=True)),
            "slot_ids": batch.slot_ids.numpy(),
            "page_tables": batch.page_tables.numpy(),
            "positions": batch.positions.numpy(),
            "ended_keys": batch.ended_keys,
            "token_ids": token_ids.numpy(),
            "shares": batch.shares,
        },
        _drawing_values(drawing) if drawing else None,
        row_tables.output_values(outputs) if outputs else None,
        row_tables.scoring_values(batch.scoring) if batch.scoring else None,
        None if spec is None else row_tables.spec_values(spec),
        row_tables.state_values(batch.states) if batch.states else None)
    return Packet(record, tuple(tensors), PacketKind.BATCH, sequence)


def unpack_batch(packet: Packet) -> StageInput:
    """
    Raises:
        InternalError: the record makes no sense, or is not one of the packet's tensors.
    """
    try:
        return _batch_of(*_BATCH.read(packet.record), tensors=packet.tensors)
    except (ValueError, IndexError, KeyError) as error:
        raise _nonsense(packet, error) from error


def pack_result(sequence: int, tokens: Sequence[DrawnToken], verified: Sequence[Verified] = (),
                scores: Sequence[Scores] = ()) -> Packet:
    """Arguments as the fields of `StageResult`."""
    record = _RESULT.write(
        _token_values("drawn", tokens) if tokens else None,
        {**put_lists("accepted", [row.accepted for row in verified]),
         **put_lists("tokens", [row.draft.token_ids for row in verified]),
         **put_lists("parents", [row.draft.parents for row in verified])} if verified else None,
        {"counts": [len(row) for row in scores],
         **_token_values("scored", [token for row in scores for token in row])} if scores else None)
    return Packet(record, kind=PacketKind.RESULT, sequence=sequence)


def unpack_result(packet: Packet) -> StageResult:
    """
    Raises:
        InternalError: the record makes no sense.
    """
    try:
        drawn, verified, scored = _RESULT.read(packet.record)
        return StageResult([] if drawn is None else _tokens_of(drawn, "drawn"),
                           [] if verified is None else _verified_of(verified),
                           [] if scored is None else _scores_of(scored))
    except (ValueError, IndexError) as error:
        raise _nonsense(packet, error) from error


def pack_error(sequence: int, text: str) -> Packet:
    """Of a batch that failed. Text beyond `MAX_ERROR_BYTES` is cut."""
    record = _ERROR.write({"text": text.encode(errors="replace")[:MAX_ERROR_BYTES]})
    return Packet(record, kind=PacketKind.ERROR, sequence=sequence)


def unpack_error(packet: Packet) -> str:
    """
    Raises:
        InternalError: the record makes no sense.
    """
    try:
        (values,) = _ERROR.read(packet.record)
        text: bytes = b"" if values is None else values["text"]
        return text.decode(errors="replace")
    except ValueError as error:
        raise _nonsense(packet, error) from error


def pack_piece(piece: PartPiece) -> Packet:
    """What a rank sends the others of its stage."""
    return Packet(_PART.pack(piece.number) + piece.data, (), piece.kind, piece.sequence)


def unpack_piece(packet: Packet, into: memoryview) -> PartPiece:
    """Its bytes are a copy, in `into` where they are as many. Raises InternalError when the record makes no sense."""
    if len(packet.record) < _PART.size or packet.tensors:
        raise InternalError(f"frame {packet.sequence} makes no sense: {len(packet.record)} bytes and "
                            f"{len(packet.tensors)} tensors of a part")
    data = memoryview(packet.record)[_PART.size:]
    own = into if len(into) == len(data) else memoryview(bytearray(len(data)))
    own[:] = data
    return PartPiece(packet.kind, packet.sequence, _PART.unpack_from(packet.record)[0], own)


def _nonsense(packet: Packet, error: Exception) -> InternalError:
    return InternalError(f"the {packet.kind.name.lower()} of frame {packet.sequence} makes no sense: {error}")


def _batch_of(step: Values | None, drawing: Values | None, outputs: Values | None, scoring: Values | None,
              spec: Values | None, states: Values | None, *, tensors: Sequence[Tensor]) -> StageInput:
    if step is None:
        raise ValueError("there is no step")
    ((mode, has_hidden, has_selected_keys),) = step["head"]
    num_rows, num_tokens = len(step["rows"]), len(step["positions"])
    keys, query_lens, context_lens = zip(*step["rows"], strict=True) if num_rows else ((), (), ())
    check_counts(query_lens, num_tokens, "tokens of the rows")
    refuse_negative({name: step[name].min(initial=0) for name in ("page_tables", "slot_ids", "positions")})
    refuse_negative({"context_len": min(context_lens, default=0)})
    if len(step["token_ids"]) not in (0, num_tokens):
        raise ValueError(f"{len(step['token_ids'])} token ids of {num_tokens}")
    refuse_negative({"token_ids": step["token_ids"].min(initial=0)})
    batch = ForwardBatch(
        mode=_MODES[mode], request_keys=keys, query_lens=query_lens, context_lens=context_lens,
        token_ids=_owned(step["token_ids"]) if len(step["token_ids"]) or not num_tokens else None,
        positions=_owned(step["positions"]), page_tables=_owned(step["page_tables"]),
        slot_ids=_owned(step["slot_ids"]),
        sampling=spread(() if drawing is None else _sampling_of(drawing, outputs), num_rows),
        scoring=() if scoring is None else spread(row_tables.scoring_of(scoring), num_rows),
        ended_keys=tuple(step["ended_keys"]), states=() if states is None else row_tables.states_of(states, num_rows),
        spec_info=None if spec is None else row_tables.spec_of(spec, query_lens, num_tokens),
        shares=tuple(DataShare(*share) for share in step["shares"]))
    if any(len(tensor) != num_tokens if tensor.dim() else True for tensor in tensors):
        raise ValueError(f"tensors of other than {num_tokens} tokens")
    computed, aux_layers = list(tensors), step["aux_layers"]
    if len(computed) != bool(has_hidden) + bool(has_selected_keys) + len(aux_layers):
        raise ValueError(f"{len(computed)} tensors came with it")
    hidden = computed.pop(0) if has_hidden else None
    selected_keys = computed.pop(0) if has_selected_keys else None
    return StageInput(batch, StageOutput(hidden=hidden, aux_hidden=dict(zip(aux_layers, computed, strict=True)),
                                         selected_keys=selected_keys))


def _drawing_values(drawing: Sequence[tuple[int, SamplingRow]]) -> Values:
    return {
        "drawing": [(place, p.temperature, p.top_k, p.top_p, p.min_p, p.frequency_penalty, p.presence_penalty,
                     p.repetition_penalty, p.seed, row.position,
                     -1 if row.num_top_logprobs is None else row.num_top_logprobs, row.banned_before)
                    for place, row in drawing for p in (row.params,)],
        **put_lists("logit_bias", [row.params.logit_bias for _, row in drawing]),
        **put_lists("banned", [row.banned_token_ids for _, row in drawing]),
    }


def _sampling_of(values: Values, of_outputs: Values | None) -> Iterator[tuple[int, SamplingRow]]:
    drawing = values["drawing"]
    outputs = spread(() if of_outputs is None else row_tables.outputs_of(of_outputs), len(drawing))
    columns = (get_lists(values, name) for name in ("logit_bias", "banned"))
    for row, output, bias, banned in zip(drawing, outputs, *columns, strict=True):
        (place, temperature, top_k, top_p, min_p, frequency, presence, repetition, seed, position, num_top,
         banned_before) = row
        yield place, SamplingRow(
            SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
                           frequency_penalty=frequency, presence_penalty=presence, repetition_penalty=repetition,
                           seed=seed, logit_bias=bias),
            position, None if num_top < 0 else num_top, banned, banned_before, output)


def _token_values(name: str, tokens: Sequence[DrawnToken]) -> Values:
    logprobs = [token.logprobs for token in tokens]
    return {
        name: [(token.token_id, found is not None, 0.0 if found is None else found.logprob, token.cause)
               for token, found in zip(tokens, logprobs, strict=True)],
        **put_lists(f"{name}.top", [() if found is None else found.top for found in logprobs]),
        **put_texts(f"{name}.problem", [token.problem for token in tokens]),
    }


def _tokens_of(values: Values, name: str) -> list[DrawnToken]:
    return [DrawnToken(token_id, TokenLogprobs(logprob, top) if has_logprobs else None, problem, ProblemCause(cause))
            for (token_id, has_logprobs, logprob, cause), top, problem in zip(
                values[name], get_lists(values, f"{name}.top"), get_texts(values, f"{name}.problem"),
                strict=True)]


def _verified_of(values: Values) -> list[Verified]:
    trees = zip(*(get_lists(values, name) for name in ("accepted", "tokens", "parents")), strict=True)
    return [Verified(nodes, TokenTree(*tree)) for nodes, *tree in trees]


def _scores_of(values: Values) -> list[Scores]:
    scored, start, scores = _tokens_of(values, "scored"), 0, []
    check_counts(values["counts"], len(scored), "scored tokens")
    for count in values["counts"]:
        scores.append(tuple(scored[start:start + count]))
        start += count
    return scores


def _owned(array: Array) -> Tensor:
    return torch.from_numpy(array.copy())
