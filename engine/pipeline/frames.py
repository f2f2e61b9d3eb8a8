"""Bytes of a batch on its way through the stages: flat arrays with a typed table of contents, never pickle. What a
stage computed are the tensors of the same packet.

A frame is a fixed header, a table (one entry per array: dtype, shape) and the arrays, each aligned to 8 bytes. Stage 0
decides membership and ships it with every batch; later stages keep nothing between frames but their pools, the last
one also the output of requests whose penalties or grammar need it: batches bring what changed of it.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.contracts.model import StageOutput
from engine.core.batch import ForwardBatch, ForwardMode, OutputOpening, OutputRow, SamplingRow, ScoringRow
from engine.core.draft_trees import AcceptedNodes, SpecInfo, SpecRow, TokenTree, Verified
from engine.core.request import DrawnToken, SamplingParams, TokenLogprobs
from engine.pipeline.channel import Packet
from engine.sampling.scoring import Scores
from runtime.errors import InternalError
from runtime.grammar import Grammar, GrammarKind

_HEADER = struct.Struct("<4sBBHQ")  # magic, schema, kind, number of arrays, sequence number
_ENTRY = struct.Struct("<BBxxIQQ")  # dtype code, dims, first three extents (0 where absent)
_MAGIC, _SCHEMA = b"BATN", 7
_DTYPES = ("uint8", "int32", "int64", "uint64", "float32", "float64")
_MODES = tuple(ForwardMode)

Array = NDArray[np.generic]


class FrameKind(IntEnum):
    BATCH = 1  # to the next stage
    RESULT = 2  # last stage to stage 0
    ERROR = 3  # a stage could not run a batch; passed on to stage 0


@dataclass(frozen=True)
class StageInput:
    """A batch as a later stage gets it."""

    batch: ForwardBatch
    incoming: StageOutput


@dataclass(frozen=True)
class Frame:
    kind: FrameKind
    sequence: int
    arrays: tuple[Array, ...]


def pack(kind: FrameKind, sequence: int, arrays: Sequence[Array]) -> bytearray:
    """One contiguous frame."""
    arrays = [np.ascontiguousarray(array) for array in arrays]
    offset = _HEADER.size + _ENTRY.size * len(arrays)
    offsets = []
    for array in arrays:
        offset = (offset + 7) & ~7
        offsets.append(offset)
        offset += array.nbytes
    frame = bytearray(offset)
    _HEADER.pack_into(frame, 0, _MAGIC, _SCHEMA, kind, len(arrays), sequence)
    for i, (array, start) in enumerate(zip(arrays, offsets, strict=True)):
        extents = (*array.shape, 0, 0, 0)[:3]
        _ENTRY.pack_into(frame, _HEADER.size + i * _ENTRY.size, _DTYPES.index(array.dtype.name), array.ndim, *extents)
        frame[start:start + array.nbytes] = array.reshape(-1).view(np.uint8).data
    return frame


def unpack(frame: bytes | bytearray | memoryview) -> Frame:
    """Arrays that copy nothing: they live as long as `frame`'s memory.

    Raises:
        InternalError: not a frame of this schema, or shorter than its own table says.
    """
    try:
        magic, schema, kind, count, sequence = _HEADER.unpack_from(frame, 0)
        if magic != _MAGIC or schema != _SCHEMA:
            raise InternalError(f"not a stage frame of schema {_SCHEMA}: magic {magic!r}, schema {schema}")
        arrays, offset = [], _HEADER.size + _ENTRY.size * count
        for i in range(count):
            code, dims, *extents = _ENTRY.unpack_from(frame, _HEADER.size + i * _ENTRY.size)
            shape, dtype = tuple(extents[:dims]), np.dtype(_DTYPES[code])
            offset = (offset + 7) & ~7
            size = int(np.prod(shape, dtype=np.int64))
            arrays.append(np.frombuffer(frame, dtype, size, offset).reshape(shape))
            offset += size * dtype.itemsize
        return Frame(FrameKind(kind), sequence, tuple(arrays))
    except (struct.error, ValueError, IndexError) as error:
        raise InternalError(f"stage frame of {len(frame)} bytes is damaged: {error}") from error


def pack_batch(sequence: int, batch: ForwardBatch, output: StageOutput) -> Packet:
    """What the next stage needs to run its layers on the batch."""
    aux_layers = sorted(output.aux_hidden)
    tensors = [tensor for tensor in (output.hidden, output.selected_keys) if tensor is not None]
    tensors += [output.aux_hidden[layer_id] for layer_id in aux_layers]
    spec = batch.spec_info if isinstance(batch.spec_info, SpecInfo) else None
    head = np.array([_MODES.index(batch.mode), output.hidden is not None, output.selected_keys is not None,
                     spec is not None, *aux_layers], np.int64)
    arrays: list[Array] = [
        head, np.array(batch.request_keys, np.int64), np.array(batch.query_lens, np.int64),
        np.array(batch.context_lens, np.int64), batch.positions.numpy(), batch.page_tables.numpy(),
        batch.slot_ids.numpy(), np.array(batch.ended_keys, np.int64), *_pack_sampling(batch.sampling),
        *_pack_scoring(batch.scoring), *(_pack_spec(spec) if spec else ())]
    return Packet(pack(FrameKind.BATCH, sequence, arrays), tuple(tensors))


def unpack_batch(frame: Frame, tensors: Sequence[Tensor] = ()) -> StageInput:
    """`tensors`: those of the packet, in its order."""
    head, request_keys, query_lens, context_lens, positions, page_tables, slot_ids, ended_keys, *rest = frame.arrays
    _, has_hidden, has_selected_keys, has_spec, *aux_layers = head.tolist()
    sampling, rest = _unpack_sampling(rest[:_SAMPLING_ARRAYS]), rest[_SAMPLING_ARRAYS:]
    scoring, rest = _unpack_scoring(*rest[:_SCORING_ARRAYS]), rest[_SCORING_ARRAYS:]
    spec = None
    if has_spec:
        spec = _unpack_spec(rest[:_SPEC_ARRAYS])
    computed = list(tensors)
    batch = ForwardBatch(
        mode=_MODES[int(head[0])], request_keys=tuple(request_keys.tolist()), query_lens=tuple(query_lens.tolist()),
        context_lens=tuple(context_lens.tolist()), token_ids=None, positions=_owned(positions),
        page_tables=_owned(page_tables), slot_ids=_owned(slot_ids), sampling=sampling, scoring=scoring,
        ended_keys=tuple(ended_keys.tolist()), spec_info=spec)
    hidden = computed.pop(0) if has_hidden else None
    selected_keys = computed.pop(0) if has_selected_keys else None
    aux_hidden = dict(zip(aux_layers, computed, strict=True))
    return StageInput(batch, StageOutput(hidden=hidden, aux_hidden=aux_hidden, selected_keys=selected_keys))


def pack_result(sequence: int, tokens: Sequence[DrawnToken], verified: Sequence[Verified] = (),
                scores: Sequence[Scores] = ()) -> bytearray:
    """The tokens of the rows that draw, in row order: one each, or as many as `verified` accepted nodes; and those of
    the rows that score."""
    return pack(FrameKind.RESULT, sequence, [
        *_pack_tokens(tokens), _ragged([row.accepted for row in verified]),
        _ragged([row.draft.token_ids for row in verified]), _ragged([row.draft.parents for row in verified]),
        np.array([len(row) for row in scores], np.int64), *_pack_tokens([token for row in scores for token in row])])


def _pack_tokens(tokens: Sequence[DrawnToken]) -> list[Array]:
    ids = np.array([token.token_id for token in tokens], np.int64)
    chosen = np.array([np.nan if token.logprobs is None else token.logprobs.logprob for token in tokens], np.float64)
    tops = [() if token.logprobs is None else token.logprobs.top for token in tokens]
    lens = np.array([len(top) for top in tops], np.int64)
    flat = [pair for top in tops for pair in top]
    problems = [token.problem.encode() for token in tokens]
    return [ids, chosen, lens, np.array([pair[0] for pair in flat], np.int64),
            np.array([pair[1] for pair in flat], np.float64), np.array([token.is_fault for token in tokens], np.int64),
            np.array([len(text) for text in problems], np.int64),
            np.frombuffer(b"".join(problems), np.uint8)]


def unpack_result(frame: Frame) -> list[DrawnToken]:
    return _unpack_tokens(frame.arrays[:_TOKEN_ARRAYS])


def unpack_scores(frame: Frame) -> list[Scores]:
    """One entry per row that scores."""
    counts, *arrays = frame.arrays[_TOKEN_ARRAYS + _VERIFIED_ARRAYS:]
    tokens = iter(_unpack_tokens(arrays))
    return [tuple(next(tokens) for _ in range(count)) for count in counts.tolist()]


def _unpack_tokens(arrays: Sequence[Array]) -> list[DrawnToken]:
    ids, chosen, lens, top_ids, top_values, faults, problem_lens = (array.tolist() for array in arrays[:-1])
    texts = arrays[-1].tobytes()
    tokens, start, at = [], 0, 0
    for token_id, logprob, count, fault, length in zip(ids, chosen, lens, faults, problem_lens, strict=True):
        top = tuple(zip(top_ids[start:start + count], top_values[start:start + count], strict=True))
        problem = texts[at:at + length].decode()
        start, at = start + count, at + length
        logprobs = None if logprob != logprob else TokenLogprobs(logprob, top)
        tokens.append(DrawnToken(token_id, logprobs, problem, bool(fault)))
    return tokens


def unpack_verified(frame: Frame) -> list[Verified]:
    """What a result says about trees; empty on a pool that does not speculate."""
    accepted, tokens, parents = (_unragged(array) for array in frame.arrays[_TOKEN_ARRAYS:][:_VERIFIED_ARRAYS])
    return [Verified(nodes, TokenTree(*tree))
            for nodes, *tree in zip(accepted, tokens, parents, strict=True)]


def pack_error(sequence: int, text: str) -> bytearray:
    return pack(FrameKind.ERROR, sequence, [np.frombuffer(text.encode()[:4096], np.uint8)])


def unpack_error(frame: Frame) -> str:
    return frame.arrays[0].tobytes().decode(errors="replace")


def _owned(array: Array) -> Tensor:
    return torch.from_numpy(array.copy())


_TOKEN_ARRAYS = 8
_VERIFIED_ARRAYS = 3
_SCORING_ARRAYS = 2
_SAMPLING_ARRAYS = 10
_SPEC_ARRAYS = 4


def _pack_spec(spec: SpecInfo) -> list[Array]:
    accepted = [row.accepted or AcceptedNodes(-1, ()) for row in spec.rows]
    return [
        spec.token_ids.numpy(),
        _ragged([row.parents for row in spec.rows]),
        _ragged([found.nodes for found in accepted]),
        np.array([(found.context_len, -1 if row.next_token_id is None else row.next_token_id, row.draft_start,
                   row.num_draft_tokens) for found, row in zip(accepted, spec.rows, strict=True)],
                   np.int64).reshape(-1, 4),
    ]


def _unpack_spec(arrays: Sequence[Array]) -> SpecInfo:
    token_ids, parents, accepted, numbers = arrays
    rows = []
    for row_parents, nodes, (kept_context, next_token, draft_start, num_draft) in zip(
            _unragged(parents), _unragged(accepted), numbers.tolist(), strict=True):
        rows.append(SpecRow(row_parents, None if kept_context < 0 else AcceptedNodes(kept_context, nodes),
                            None if next_token < 0 else next_token, draft_start, num_draft))
    return SpecInfo(_owned(token_ids), tuple(rows))


def _ragged(lists: Sequence[Sequence[int]]) -> Array:
    """[number of lists, their lengths..., all values...]"""
    return np.array([len(lists), *(len(x) for x in lists), *(v for x in lists for v in x)], np.int64)


def _unragged(array: Array) -> list[tuple[int, ...]]:
    values = array.tolist()
    lens, start, lists = values[1:1 + values[0]], 1 + values[0], []
    for length in lens:
        lists.append(tuple(values[start:start + length]))
        start += length
    return lists


def _pack_scoring(rows: Sequence[ScoringRow | None]) -> list[Array]:
    return [np.array([-1 if row is None else row.num_top for row in rows], np.int64),
            _ragged([() if row is None else row.next_token_ids for row in rows])]


def _unpack_scoring(num_top: Array, next_token_ids: Array) -> tuple[ScoringRow | None, ...]:
    return tuple(None if count < 0 else ScoringRow(tokens, count)
                 for count, tokens in zip(num_top.tolist(), _unragged(next_token_ids), strict=True))


def _pack_sampling(rows: Sequence[SamplingRow | None]) -> list[Array]:
    drawing = [row for row in rows if row is not None]
    params = [row.params for row in drawing]
    outputs = [row.output for row in drawing]
    biases = [p.logit_bias for p in params]
    return [
        np.array([row is not None for row in rows], np.uint8),
        np.array([(p.temperature, p.top_p, p.min_p, p.frequency_penalty, p.presence_penalty, p.repetition_penalty)
                  for p in params], np.float64).reshape(-1, 6),
        np.array([(p.top_k, row.position, -1 if row.num_top_logprobs is None else row.num_top_logprobs,
                   row.banned_before, *_output_numbers(row.output)) for p, row in zip(params, drawing, strict=True)],
                 np.int64).reshape(-1, 9),
        np.array([p.seed for p in params], np.uint64),
        _ragged([[token for token, _ in bias] for bias in biases]),
        np.array([value for bias in biases for _, value in bias], np.float64),
        _ragged([side for output in outputs for side in _output_tokens(output)]),
        _ragged([row.banned_token_ids for row in drawing]),
        *_pack_grammars([None if output is None or output.opening is None else output.opening.grammar
                         for output in outputs]),
    ]


def _output_numbers(output: OutputRow | None) -> tuple[int, int, int, int, int]:
    """Whether there is one, its key and `kept`, whether it opens and is the only one."""
    if output is None:
        return 0, 0, 0, 0, 0
    return 1, output.key, output.kept, output.opening is not None, output.is_only


def _output_tokens(output: OutputRow | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Those of the opening's prompt, and the new ones."""
    if output is None:
        return (), ()
    return () if output.opening is None else output.opening.prompt_token_ids, output.token_ids


def _pack_grammars(grammars: Sequence[Grammar | None]) -> list[Array]:
    """Texts lie one after the other in UTF-8; a row without a grammar has none."""
    texts = [() if grammar is None else (grammar.kind.encode(), grammar.encoded) for grammar in grammars]
    return [_ragged([[len(text) for text in row] for row in texts]),
            np.frombuffer(b"".join(text for row in texts for text in row), np.uint8)]


def _unpack_grammars(lens: Array, data: Array) -> Iterator[Grammar | None]:
    start, raw = 0, data.tobytes()
    for row_lens in _unragged(lens):
        texts = []
        for length in row_lens:
            texts.append(raw[start:start + length].decode("utf-8", "surrogatepass"))
            start += length
        yield Grammar(GrammarKind(texts[0]), texts[1]) if texts else None


def _unpack_sampling(arrays: Sequence[Array]) -> tuple[SamplingRow | None, ...]:
    draws, floats, ints, seeds, bias_ids, bias_values, tokens, banned, *grammar_arrays = arrays
    grammars = list(_unpack_grammars(*grammar_arrays))
    bias_lists, sides, bans = _unragged(bias_ids), _unragged(tokens), _unragged(banned)
    values, start, drawing = bias_values.tolist(), 0, []
    for i, (numbers, whole, seed) in enumerate(zip(floats.tolist(), ints.tolist(), seeds.tolist(), strict=True)):
        temperature, top_p, min_p, frequency, presence, repetition = numbers
        top_k, position, num_top, banned_before, has_output, key, kept, opens, is_only = whole
        bias = tuple(zip(bias_lists[i], values[start:start + len(bias_lists[i])], strict=True))
        start += len(bias)
        prompt, new = sides[2 * i], sides[2 * i + 1]
        opening = OutputOpening(prompt, grammars[i]) if opens else None
        drawing.append(SamplingRow(
            SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
                           frequency_penalty=frequency, presence_penalty=presence, repetition_penalty=repetition,
                           seed=seed, logit_bias=bias),
            position, None if num_top < 0 else num_top, bans[i], banned_before,
            OutputRow(key, kept, new, opening, bool(is_only)) if has_output else None))
    rows = iter(drawing)
    return tuple(next(rows) if draw else None for draw in draws.tolist())
