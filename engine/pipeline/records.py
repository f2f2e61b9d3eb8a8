"""What a packet's record holds: a batch on its way through the stages, the result of the last one, or an error.

Stage 0 decides membership and ships it with every batch; later stages keep nothing between packets but their pools, the
last one also the output of requests whose penalties or grammar need it: batches bring what changed of it. What a stage
computed are the tensors of the same packet. Where a whole number may be absent, -1 stands for that.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from engine.contracts.model import StageOutput
from engine.core.batch import ForwardBatch, ForwardMode, OutputOpening, OutputRow, SamplingRow, ScoringRow
from engine.core.draft_trees import AcceptedNodes, SpecInfo, SpecRow, TokenTree, Verified
from engine.core.request import DrawnToken, SamplingParams, TokenLogprobs
from engine.core.state_rows import Snapshot, StateRow
from engine.pipeline.channel import Packet, PacketKind
from engine.pipeline.frames import SCHEMA
from engine.pipeline.tables import (
    Array,
    Column,
    Table,
    column,
    counts_of,
    get_bytes,
    get_lists,
    get_texts,
    lists,
    put_bytes,
    put_lists,
    put_texts,
    row_type,
)
from engine.sampling.sampler import Scores
from runtime.errors import InternalError
from runtime.grammar import Grammar, GrammarKind

T = TypeVar("T")
MAX_ERROR_BYTES = 4096
_MODES = tuple(ForwardMode)
_PAIR = row_type(token_id="i8", value="f8")

_BATCH = Table(
    "batch",
    column("head", row_type(mode="u1", has_hidden="u1", has_selected_keys="u1", has_scoring="u1", has_spec="u1"), 1),
    column("aux_layers", "i4", "aux_layers"),
    column("rows", row_type(request_key="i8", query_len="i8", context_len="i8"), "rows"),
    column("slot_ids", "i4", "rows"),
    column("page_tables", "i4", "rows", "pages"),
    column("positions", "i8", "tokens"),
    # One entry per row that draws.
    column("drawing", row_type(
        row="i4", temperature="f8", top_k="i8", top_p="f8", min_p="f8", frequency_penalty="f8", presence_penalty="f8",
        repetition_penalty="f8", seed="u8", position="i8", num_top_logprobs="i8", banned_before="i8"),
        "drawing"),
    *lists("logit_bias", _PAIR, per="drawing"),
    *lists("banned", "i8", per="drawing"),
    # One per drawing row whose output matters; of these one per opening; of these one per grammar.
    column("outputs", row_type(drawing="i4", key="i8", kept="i8", is_only="u1"), "outputs"),
    *lists("output.tokens", "i8", per="outputs"),
    column("openings", "i4", "openings"),
    *lists("opening.prompt", "i8", per="openings"),
    column("grammars", "i4", "grammars"),
    *lists("grammar.kind", "u1", per="grammars"),
    *lists("grammar.text", "u1", per="grammars"),
    column("ended_keys", "i8", "ended_keys"),
    # One per row that scores.
    column("scoring", row_type(row="i4", num_top="i8"), "scoring"),
    *lists("scoring.tokens", "i8", per="scoring"),
    # One per row, where a prefix cache does something with states.
    column("states", "i4", "states"),
    *lists("states.snapshots", row_type(num_tokens="i8", slot_id="i8"), per="states"),
    # One per row, on a pool that speculates.
    column("spec", row_type(accepted_context="i8", next_token_id="i8", draft_start="i8", num_draft_tokens="i8",
                            scratch="i4"), "spec"),
    column("spec.tokens", "i8", "spec.tokens"),
    *lists("spec.parents", "i8", per="spec"),
    *lists("spec.accepted", "i8", per="spec"),
)


def _token_columns(name: str) -> tuple[Column, ...]:
    return (column(name, row_type(token_id="i8", has_logprobs="u1", logprob="f8", is_fault="u1"), name),
            *lists(f"{name}.top", _PAIR, per=name), *lists(f"{name}.problem", "u1", per=name))


_RESULT = Table(
    "result",
    *_token_columns("drawn"),
    *lists("verified.accepted", "i8", per="verified"),
    *lists("verified.tokens", "i8", per="verified"),
    *lists("verified.parents", "i8", per="verified"),
    column("scored_counts", "i8", "scoring"),
    *_token_columns("scored"),
)
_ERROR = Table("error", column("text", "u1", "bytes"))
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
    aux_layers = sorted(output.aux_hidden)
    tensors = [tensor for tensor in (output.hidden, output.selected_keys) if tensor is not None]
    tensors += [output.aux_hidden[layer_id] for layer_id in aux_layers]
    spec = batch.spec_info if isinstance(batch.spec_info, SpecInfo) else None
    record = _BATCH.write({
        "head": [(_MODES.index(batch.mode), output.hidden is not None, output.selected_keys is not None,
                  bool(batch.scoring), spec is not None)],
        "aux_layers": aux_layers,
        "rows": list(zip(batch.request_keys, batch.query_lens, batch.context_lens, strict=True)),
        "slot_ids": batch.slot_ids.numpy(),
        "page_tables": batch.page_tables.numpy(),
        "positions": batch.positions.numpy(),
        "ended_keys": batch.ended_keys,
        **_sampling_values(batch.sampling), **_scoring_values(batch.scoring), **_spec_values(spec),
        "states": [row.resumed_slot for row in batch.states],
        **put_lists("states.snapshots", [row.snapshots for row in batch.states]),
    })
    return Packet(record, tuple(tensors), PacketKind.BATCH, sequence)


def unpack_batch(packet: Packet) -> StageInput:
    """
    Raises:
        InternalError: the record makes no sense, or is not one of the packet's tensors.
    """
    try:
        return _batch_of(_BATCH.read(packet.record), packet.tensors)
    except (ValueError, IndexError, KeyError) as error:
        raise _nonsense(packet, error) from error


def pack_result(sequence: int, tokens: Sequence[DrawnToken], verified: Sequence[Verified] = (),
                scores: Sequence[Scores] = ()) -> Packet:
    record = _RESULT.write({
        **_token_values("drawn", tokens),
        **put_lists("verified.accepted", [row.accepted for row in verified]),
        **put_lists("verified.tokens", [row.draft.token_ids for row in verified]),
        **put_lists("verified.parents", [row.draft.parents for row in verified]),
        "scored_counts": [len(row) for row in scores],
        **_token_values("scored", [token for row in scores for token in row]),
    })
    return Packet(record, kind=PacketKind.RESULT, sequence=sequence)


def unpack_result(packet: Packet) -> StageResult:
    """
    Raises:
        InternalError: the record makes no sense.
    """
    try:
        arrays = _RESULT.read(packet.record)
        rows = zip(*(get_lists(arrays, f"verified.{name}") for name in ("accepted", "tokens", "parents")), strict=True)
        verified = [Verified(nodes, TokenTree(*tree)) for nodes, *tree in rows]
        scored, start, scores = _tokens_of(arrays, "scored"), 0, []
        for count in counts_of(arrays["scored_counts"], len(scored), "scored tokens"):
            scores.append(tuple(scored[start:start + count]))
            start += count
        return StageResult(_tokens_of(arrays, "drawn"), verified, scores)
    except (ValueError, IndexError) as error:
        raise _nonsense(packet, error) from error


def pack_error(sequence: int, text: str) -> Packet:
    record = _ERROR.write({"text": np.frombuffer(text.encode(errors="replace")[:MAX_ERROR_BYTES], np.uint8)})
    return Packet(record, kind=PacketKind.ERROR, sequence=sequence)


def unpack_error(packet: Packet) -> str:
    """
    Raises:
        InternalError: the record makes no sense.
    """
    try:
        return _ERROR.read(packet.record)["text"].tobytes().decode(errors="replace")
    except ValueError as error:
        raise _nonsense(packet, error) from error


def _nonsense(packet: Packet, error: Exception) -> InternalError:
    return InternalError(f"the {packet.kind.name.lower()} of frame {packet.sequence} makes no sense: {error}")


def _batch_of(arrays: Mapping[str, Array], tensors: Sequence[Tensor]) -> StageInput:
    mode, has_hidden, has_selected_keys, has_scoring, has_spec = arrays["head"].tolist()[0]
    rows, num_tokens = arrays["rows"].tolist(), len(arrays["positions"])
    counts_of(arrays["rows"]["query_len"], num_tokens, "tokens of the rows")
    _refuse_negative(arrays, ("rows", "context_len"), ("page_tables", ""), ("slot_ids", ""), ("positions", ""),
                     ("outputs", "kept"), ("spec", "scratch"), ("states", ""))
    batch = ForwardBatch(
        mode=_MODES[mode], request_keys=tuple(row[0] for row in rows), query_lens=tuple(row[1] for row in rows),
        context_lens=tuple(row[2] for row in rows), token_ids=None, positions=_owned(arrays["positions"]),
        page_tables=_owned(arrays["page_tables"]), slot_ids=_owned(arrays["slot_ids"]),
        sampling=_spread(_sampling_of(arrays), len(rows)),
        scoring=_spread(_scoring_of(arrays), len(rows)) if has_scoring else (),
        ended_keys=tuple(arrays["ended_keys"].tolist()), states=_states_of(arrays, len(rows)),
        spec_info=_spec_of(arrays, [row[1] for row in rows], num_tokens) if has_spec else None)
    if any(len(tensor) != num_tokens if tensor.dim() else True for tensor in tensors):
        raise ValueError(f"tensors of other than {num_tokens} tokens")
    computed, aux_layers = list(tensors), arrays["aux_layers"].tolist()
    if len(computed) != bool(has_hidden) + bool(has_selected_keys) + len(aux_layers):
        raise ValueError(f"{len(computed)} tensors came with it")
    hidden = computed.pop(0) if has_hidden else None
    selected_keys = computed.pop(0) if has_selected_keys else None
    return StageInput(batch, StageOutput(hidden=hidden, aux_hidden=dict(zip(aux_layers, computed, strict=True)),
                                         selected_keys=selected_keys))


def _sampling_values(rows: Sequence[SamplingRow | None]) -> dict[str, object]:
    drawing = [(place, row, row.params) for place, row in enumerate(rows) if row is not None]
    return {
        "drawing": [(place, p.temperature, p.top_k, p.top_p, p.min_p, p.frequency_penalty, p.presence_penalty,
                     p.repetition_penalty, p.seed, row.position,
                     -1 if row.num_top_logprobs is None else row.num_top_logprobs, row.banned_before)
                    for place, row, p in drawing],
        **put_lists("logit_bias", [p.logit_bias for _, _, p in drawing]),
        **put_lists("banned", [row.banned_token_ids for _, row, _ in drawing]),
        **_output_values([row.output for _, row, _ in drawing]),
    }


def _sampling_of(arrays: Mapping[str, Array]) -> Iterator[tuple[int, SamplingRow]]:
    drawing = arrays["drawing"].tolist()
    outputs = _spread(_outputs_of(arrays), len(drawing))
    columns = (get_lists(arrays, name) for name in ("logit_bias", "banned"))
    for values, output, bias, banned in zip(drawing, outputs, *columns, strict=True):
        (place, temperature, top_k, top_p, min_p, frequency, presence, repetition, seed, position, num_top,
         banned_before) = values
        yield place, SamplingRow(
            SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
                           frequency_penalty=frequency, presence_penalty=presence, repetition_penalty=repetition,
                           seed=seed, logit_bias=bias),
            position, None if num_top < 0 else num_top, banned, banned_before, output)


def _output_values(rows: Sequence[OutputRow | None]) -> dict[str, object]:
    outputs = [(place, row) for place, row in enumerate(rows) if row is not None]
    openings = [(place, row.opening) for place, (_, row) in enumerate(outputs) if row.opening is not None]
    grammars = [(place, opening.grammar) for place, (_, opening) in enumerate(openings) if opening.grammar is not None]
    return {
        "outputs": [(place, row.key, row.kept, row.is_only) for place, row in outputs],
        **put_lists("output.tokens", [row.token_ids for _, row in outputs]),
        "openings": [place for place, _ in openings],
        **put_lists("opening.prompt", [opening.prompt_token_ids for _, opening in openings]),
        "grammars": [place for place, _ in grammars],
        **put_texts("grammar.kind", [grammar.kind for _, grammar in grammars]),
        **put_bytes("grammar.text", [grammar.encoded for _, grammar in grammars]),
    }


def _outputs_of(arrays: Mapping[str, Array]) -> Iterator[tuple[int, OutputRow]]:
    outputs = arrays["outputs"].tolist()
    grammars = _spread(zip(arrays["grammars"].tolist(), _grammars_of(arrays), strict=True), len(arrays["openings"]))
    opened = [OutputOpening(prompt, grammar)
              for prompt, grammar in zip(get_lists(arrays, "opening.prompt"), grammars, strict=True)]
    openings = _spread(zip(arrays["openings"].tolist(), opened, strict=True), len(outputs))
    for (place, key, kept, is_only), tokens, opening in zip(outputs, get_lists(arrays, "output.tokens"), openings,
                                                            strict=True):
        yield place, OutputRow(key, kept, tokens, opening, bool(is_only))


def _grammars_of(arrays: Mapping[str, Array]) -> Iterator[Grammar]:
    for kind, text in zip(get_texts(arrays, "grammar.kind"), get_bytes(arrays, "grammar.text"), strict=True):
        yield Grammar(GrammarKind(kind), text.decode("utf-8", "surrogatepass"))


def _scoring_values(rows: Sequence[ScoringRow | None]) -> dict[str, object]:
    scoring = [(place, row) for place, row in enumerate(rows) if row is not None]
    return {"scoring": [(place, row.num_top) for place, row in scoring],
            **put_lists("scoring.tokens", [row.next_token_ids for _, row in scoring])}


def _scoring_of(arrays: Mapping[str, Array]) -> Iterator[tuple[int, ScoringRow]]:
    for (place, num_top), tokens in zip(arrays["scoring"].tolist(), get_lists(arrays, "scoring.tokens"), strict=True):
        yield place, ScoringRow(tokens, num_top)


def _states_of(arrays: Mapping[str, Array], num_rows: int) -> tuple[StateRow, ...]:
    rows = tuple(StateRow(slot, tuple(Snapshot(*values) for values in snapshots)) for slot, snapshots in zip(
        arrays["states"].tolist(), get_lists(arrays, "states.snapshots"), strict=True))
    if len(rows) not in (0, num_rows):
        raise ValueError(f"the states of {len(rows)} rows of {num_rows}")
    return rows


def _spec_values(spec: SpecInfo | None) -> dict[str, object]:
    rows = () if spec is None else spec.rows
    accepted = [row.accepted or AcceptedNodes(-1, ()) for row in rows]
    return {
        "spec": [(nodes.context_len, -1 if row.next_token_id is None else row.next_token_id, row.draft_start,
                  row.num_draft_tokens, row.scratch) for nodes, row in zip(accepted, rows, strict=True)],
        "spec.tokens": () if spec is None else spec.token_ids.numpy(),
        **put_lists("spec.parents", [row.parents for row in rows]),
        **put_lists("spec.accepted", [nodes.nodes for nodes in accepted]),
    }


def _spec_of(arrays: Mapping[str, Array], query_lens: Sequence[int], num_tokens: int) -> SpecInfo:
    if len(arrays["spec.tokens"]) != num_tokens:
        raise ValueError(f"{len(arrays['spec.tokens'])} tokens to verify of {num_tokens}")
    rows = []
    for length, (context_len, next_token_id, draft_start, num_draft_tokens, scratch), parents, nodes in zip(
            query_lens, arrays["spec"].tolist(), get_lists(arrays, "spec.parents"), get_lists(arrays, "spec.accepted"),
            strict=True):
        if parents and (len(parents) != length or any(not -1 <= parent < node for node, parent in enumerate(parents))):
            raise ValueError(f"the parents {parents[:8]} of a row of {length} tokens")
        rows.append(SpecRow(parents, None if context_len < 0 else AcceptedNodes(context_len, nodes),
                            None if next_token_id < 0 else next_token_id, draft_start, num_draft_tokens, scratch))
    return SpecInfo(_owned(arrays["spec.tokens"]), tuple(rows))


def _token_values(name: str, tokens: Sequence[DrawnToken]) -> dict[str, object]:
    logprobs = [token.logprobs for token in tokens]
    return {
        name: [(token.token_id, found is not None, 0.0 if found is None else found.logprob, token.is_fault)
               for token, found in zip(tokens, logprobs, strict=True)],
        **put_lists(f"{name}.top", [() if found is None else found.top for found in logprobs]),
        **put_texts(f"{name}.problem", [token.problem for token in tokens]),
    }


def _tokens_of(arrays: Mapping[str, Array], name: str) -> list[DrawnToken]:
    return [DrawnToken(token_id, TokenLogprobs(logprob, top) if has_logprobs else None, problem, bool(is_fault))
            for (token_id, has_logprobs, logprob, is_fault), top, problem in zip(
                arrays[name].tolist(), get_lists(arrays, f"{name}.top"), get_texts(arrays, f"{name}.problem"),
                strict=True)]


def _spread(entries: Iterable[tuple[int, T]], count: int) -> tuple[T | None, ...]:
    """`count` places, those of the entries (place, value) filled and the others None. Places go up."""
    spread: list[T | None] = [None] * count
    last = -1
    for place, value in entries:
        if not last < place < count:
            raise ValueError(f"an entry for place {place} after {last}, of {count}")
        spread[place], last = value, place
    return tuple(spread)


def _refuse_negative(arrays: Mapping[str, Array], *places: tuple[str, str]) -> None:
    for name, part in places:
        array = arrays[name][part] if part else arrays[name]
        if array.size and array.min() < 0:
            raise ValueError(f"{name} {part} below 0")


def _owned(array: Array) -> Tensor:
    return torch.from_numpy(array.copy())
