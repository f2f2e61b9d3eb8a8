"""Tables of a batch's record that only some batches have, and what they hold: the output that penalties and grammars
need, prompts to score, trees to verify, states to keep. Where a whole number may be absent, -1 stands for that.

Functions that read raise ValueError where the values make no sense.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from engine.core.batch import OutputOpening, OutputRow, ScoringRow
from engine.core.draft_trees import AcceptedNodes, SpecInfo, SpecRow
from engine.core.state_rows import Snapshot, StateRow
from engine.pipeline.tables import (
    Table,
    column,
    get_bytes,
    get_lists,
    get_texts,
    ids,
    lists,
    numbers,
    put_bytes,
    put_lists,
    put_texts,
    refuse_negative,
    spread,
    texts,
    tuples,
)
from runtime.grammar import Grammar, GrammarKind

Values = Mapping[str, Any]  # by column

OUTPUTS = Table(  # one per drawing row whose output matters; of these one per opening; of these one per grammar
    "outputs",
    tuples("outputs", "outputs", drawing="i4", key="i8", kept="i8", is_only="u1"),
    *lists(ids("output.tokens"), per="outputs"),
    numbers("openings", "i4", "openings"),
    *lists(ids("opening.prompt"), per="openings"),
    numbers("grammars", "i4", "grammars"),
    *lists(texts("grammar.kind"), per="grammars"),
    *lists(texts("grammar.text"), per="grammars"),
)
SCORING = Table(  # one per row that scores
    "scoring",
    tuples("scoring", "scoring", row="i4", num_top="i8"),
    *lists(ids("scoring.tokens"), per="scoring"),
)
SPEC = Table(  # one per row, on a pool that speculates
    "spec",
    tuples("spec", "spec", accepted_context="i8", next_token_id="i8", draft_start="i8", num_draft_tokens="i8",
           scratch="i4"),
    column("spec.tokens", "i8", "spec.tokens"),
    *lists(ids("spec.parents"), per="spec"),
    *lists(ids("spec.accepted"), per="spec"),
)
STATES = Table(  # one per row, where a prefix cache does something with states
    "states",
    numbers("states", "i4", "states"),
    *lists(tuples("states.snapshots", "states.snapshots.total", num_tokens="i8", slot_id="i4"), per="states"),
)


def output_values(outputs: Sequence[tuple[int, OutputRow]]) -> Values:
    """Of rows whose output matters, each with its place among those that draw."""
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


def outputs_of(values: Values) -> Iterator[tuple[int, OutputRow]]:
    """What `output_values` was given."""
    outputs = values["outputs"]
    refuse_negative({"kept": min((row[2] for row in outputs), default=0)})
    grammars = spread(zip(values["grammars"], _grammars_of(values), strict=True), len(values["openings"]))
    opened = [OutputOpening(prompt, grammar)
              for prompt, grammar in zip(get_lists(values, "opening.prompt"), grammars, strict=True)]
    openings = spread(zip(values["openings"], opened, strict=True), len(outputs))
    for (place, key, kept, is_only), tokens, opening in zip(outputs, get_lists(values, "output.tokens"), openings,
                                                            strict=True):
        yield place, OutputRow(key, kept, tokens, opening, bool(is_only))


def _grammars_of(values: Values) -> Iterator[Grammar]:
    for kind, text in zip(get_texts(values, "grammar.kind"), get_bytes(values, "grammar.text"), strict=True):
        yield Grammar(GrammarKind(kind), text.decode("utf-8", "surrogatepass"))


def scoring_values(rows: Sequence[ScoringRow | None]) -> Values:
    """One for each row of the batch; None scores nothing."""
    scoring = [(place, row) for place, row in enumerate(rows) if row is not None]
    return {"scoring": [(place, row.num_top) for place, row in scoring],
            **put_lists("scoring.tokens", [row.next_token_ids for _, row in scoring])}


def scoring_of(values: Values) -> Iterator[tuple[int, ScoringRow]]:
    """The rows that score, each with its place in the batch."""
    for (place, num_top), tokens in zip(values["scoring"], get_lists(values, "scoring.tokens"), strict=True):
        yield place, ScoringRow(tokens, num_top)


def state_values(rows: Sequence[StateRow]) -> Values:
    """One for each row of the batch."""
    return {"states": [row.resumed_slot for row in rows],
            **put_lists("states.snapshots", [row.snapshots for row in rows])}


def states_of(values: Values, num_rows: int) -> tuple[StateRow, ...]:
    """What `state_values` was given, of a batch of so many rows."""
    rows = tuple(StateRow(slot, tuple(Snapshot(*each) for each in snapshots)) for slot, snapshots in zip(
        values["states"], get_lists(values, "states.snapshots"), strict=True))
    if len(rows) != num_rows:
        raise ValueError(f"the states of {len(rows)} rows of {num_rows}")
    refuse_negative({"states": min(values["states"], default=0)})
    return rows


def spec_values(spec: SpecInfo) -> Values:
    """The trees that a batch verifies."""
    rows = spec.rows
    accepted = [row.accepted or AcceptedNodes(-1, ()) for row in rows]
    return {
        "spec": [(nodes.context_len, -1 if row.next_token_id is None else row.next_token_id, row.draft_start,
                  -1 if row.num_draft_tokens is None else row.num_draft_tokens, row.scratch)
                 for nodes, row in zip(accepted, rows, strict=True)],
        "spec.tokens": spec.token_ids.numpy(),
        **put_lists("spec.parents", [row.parents for row in rows]),
        **put_lists("spec.accepted", [nodes.nodes for nodes in accepted]),
    }


def spec_of(values: Values, query_lens: Sequence[int], num_tokens: int) -> SpecInfo:
    """What `spec_values` was given, of a batch whose rows have so many tokens, `num_tokens` in all."""
    if len(values["spec.tokens"]) != num_tokens:
        raise ValueError(f"{len(values['spec.tokens'])} tokens to verify of {num_tokens}")
    refuse_negative({"scratch": min((row[4] for row in values["spec"]), default=0)})
    rows = []
    for length, (context_len, next_token_id, draft_start, num_draft_tokens, scratch), parents, nodes in zip(
            query_lens, values["spec"], get_lists(values, "spec.parents"), get_lists(values, "spec.accepted"),
            strict=True):
        if parents and (len(parents) != length or any(not -1 <= parent < node for node, parent in enumerate(parents))):
            raise ValueError(f"the parents {parents[:8]} of a row of {length} tokens")
        rows.append(SpecRow(parents, None if context_len < 0 else AcceptedNodes(context_len, nodes),
                            None if next_token_id < 0 else next_token_id, draft_start,
                            None if num_draft_tokens < 0 else num_draft_tokens, scratch))
    return SpecInfo(torch.from_numpy(values["spec.tokens"].copy()), tuple(rows))
