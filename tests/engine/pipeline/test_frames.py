"""Records between stages: packing and unpacking gives equal values, and malformed records are
refused."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.contracts.model import StageOutput
from engine.core.batch import (
    ForwardBatch,
    ForwardMode,
    OutputOpening,
    OutputRow,
    SamplingRow,
    ScoringRow,
)
from engine.core.draft_trees import AcceptedNodes, SpecInfo, SpecRow, TokenTree, Verified
from engine.core.request import ProblemCause, SampledToken, SamplingParams, TokenLogprobs
from engine.core.rows import Row, build_batch
from engine.core.state_rows import StateRow, StateSnapshot
from engine.pipeline import records
from engine.pipeline.channel import Packet
from runtime.errors import InternalError
from runtime.grammar import Grammar, GrammarKind

PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_k=st.integers(0, 99),
    top_p=st.floats(0.1, 1),
    min_p=st.floats(0, 1),
    frequency_penalty=st.floats(-2, 2),
    presence_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.5, 2),
    seed=st.integers(0, 2**64 - 1),
    logit_bias=st.lists(st.tuples(st.integers(0, 9), st.floats(-5, 5)), max_size=3).map(tuple),
)
GRAMMARS = st.builds(
    Grammar.of, st.sampled_from(GrammarKind), st.text(st.characters(exclude_categories=()))
)
TOKENS = st.lists(st.integers(0, 999), max_size=4).map(tuple)
SAMPLING = st.none() | st.builds(
    SamplingRow,
    PARAMS,
    st.integers(0, 10**6),
    st.none() | st.integers(0, 20),
    TOKENS,
    st.integers(0, 10**6),
    st.none()
    | st.builds(
        OutputRow,
        st.integers(0, 2**40),
        st.integers(0, 10**6),
        TOKENS,
        st.none() | st.builds(OutputOpening, TOKENS, st.none() | GRAMMARS),
        st.booleans(),
    ),
)
SPEC_ROWS = st.builds(
    SpecRow,
    st.just(()),
    st.none() | st.builds(AcceptedNodes, st.integers(0, 99), TOKENS),
    st.none() | st.integers(0, 99),
    st.integers(0, 99),
    st.integers(0, 32),
)
TREES = st.lists(st.integers(0, 99), max_size=4).map(
    lambda tokens: TokenTree(tuple(tokens), tuple(range(-1, len(tokens) - 1)))
)


def batches() -> st.SearchStrategy[ForwardBatch]:
    row = st.builds(
        Row,
        key=st.integers(1, 2**40),
        token_ids=st.lists(st.integers(0, 99), min_size=1, max_size=5),
        context_len=st.integers(0, 70),
        page_ids=st.lists(st.integers(1, 50), min_size=1, max_size=4),
        slot_id=st.integers(0, 9),
        sampling=SAMPLING,
        spec=st.none(),
        scoring=st.none() | st.builds(ScoringRow, TOKENS, st.integers(0, 20)),
        states=st.just(StateRow())
        | st.builds(
            StateRow,
            st.integers(0, 9),
            st.lists(
                st.builds(StateSnapshot, st.integers(1, 10**6), st.integers(1, 9)), max_size=2
            ).map(tuple),
        ),
    )
    plain = st.builds(
        lambda batch, ended: replace(batch, ended_keys=ended),
        st.builds(build_batch, st.sampled_from(ForwardMode), st.lists(row, max_size=4)),
        TOKENS,
    )
    chain = st.builds(
        lambda row, spec: row._replace(
            spec=replace(spec, parents=tuple(range(-1, len(row.token_ids) - 1)))
        ),
        row,
        SPEC_ROWS,
    )
    return plain | st.builds(build_batch, st.just(ForwardMode.VERIFY), st.lists(chain, max_size=4))


@given(
    batch=batches(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    aux=st.sets(st.integers(0, 40)),
)
def test_batch_survives_the_wire(batch: ForwardBatch, dtype: torch.dtype, aux: set[int]) -> None:
    hidden = torch.randn(batch.num_tokens, 6).to(dtype)
    captured = {layer_id: torch.randn(batch.num_tokens, 6).to(dtype) for layer_id in aux}
    selected = (
        torch.randint(-1, 99, (batch.num_tokens, 3), dtype=torch.int32) if len(aux) % 2 else None
    )
    output = StageOutput(hidden=hidden, aux_hidden=captured, selected_keys=selected)
    arrived = records.unpack_batch(records.pack_batch(7, batch, output))
    incoming = arrived.incoming
    assert incoming.hidden is not None
    assert torch.equal(incoming.hidden, hidden)
    assert incoming.hidden.dtype is dtype
    assert incoming.aux_hidden.keys() == captured.keys()
    assert all(torch.equal(incoming.aux_hidden[layer_id], captured[layer_id]) for layer_id in aux)
    assert (incoming.selected_keys is None) == (selected is None)
    assert selected is None or torch.equal(torch.as_tensor(incoming.selected_keys), selected)
    for name in (
        "mode",
        "request_keys",
        "query_lens",
        "context_lens",
        "sampling",
        "scoring",
        "ended_keys",
        "states",
    ):
        assert getattr(arrived.batch, name) == getattr(batch, name)
    for name in ("positions", "page_tables", "slot_ids"):
        assert torch.equal(getattr(arrived.batch, name), getattr(batch, name))
    if batch.spec_info is None:
        assert arrived.batch.spec_info is None
    else:
        assert isinstance(batch.spec_info, SpecInfo)
        assert isinstance(arrived.batch.spec_info, SpecInfo)
        assert arrived.batch.spec_info.rows == batch.spec_info.rows
        assert torch.equal(arrived.batch.spec_info.token_ids, batch.spec_info.token_ids)
    assert arrived.batch.needs_forward_metadata_init(), "a plan does not travel"


DRAWN = st.lists(
    st.builds(
        SampledToken,
        st.integers(0, 2**31),
        st.none()
        | st.builds(
            TokenLogprobs,
            st.floats(-50, 0),
            st.lists(st.tuples(st.integers(0, 99), st.floats(-50, 0)), max_size=3).map(tuple),
        ),
        st.text(max_size=5),
        st.sampled_from(ProblemCause),
    )
)


@given(tokens=DRAWN, scores=st.lists(DRAWN.map(tuple), max_size=3))
def test_result_survives_the_wire(
    tokens: list[SampledToken], scores: list[tuple[SampledToken, ...]]
) -> None:
    packet = records.pack_result(9, tokens, scores=scores)
    assert packet.sequence == 9
    assert records.unpack_result(packet) == records.StageResult(tokens, [], scores)


@given(st.lists(st.builds(Verified, st.lists(st.integers(0, 31), min_size=1).map(tuple), TREES)))
def test_verified_tokens_survive_the_wire(verified: list[Verified]) -> None:
    tokens = [SampledToken(node) for row in verified for node in row.accepted]
    assert records.unpack_result(records.pack_result(9, tokens, verified)) == records.StageResult(
        tokens, verified, []
    )


@given(st.text(max_size=50))
def test_errors_survive_the_wire(text: str) -> None:
    assert records.unpack_error(records.pack_error(9, text)) == text


def test_a_long_error_is_truncated() -> None:
    assert (
        records.unpack_error(records.pack_error(9, "x" * 10_000)) == "x" * records.MAX_ERROR_BYTES
    )


@given(cut=st.integers(0, 200), junk=st.binary(max_size=300))
def test_nonsense_is_an_error(cut: int, junk: bytes) -> None:
    packet = records.pack_result(1, [SampledToken(5, TokenLogprobs(-1.0, ((1, -2.0),)))])
    for record in (packet.record[: min(cut, len(packet.record) - 1)], junk):
        with pytest.raises(InternalError, match="malformed result in frame 1"):
            records.unpack_result(replace(packet, record=record))


def batch_packet() -> Packet:
    batch = build_batch(
        ForwardMode.PREFILL, [Row(1, [3, 4], 5, [1], 0, SamplingRow(SamplingParams(), 7))]
    )
    return records.pack_batch(3, batch, StageOutput(hidden=torch.zeros(2, 6)))


@pytest.mark.parametrize(
    "tensors", [(), (torch.zeros(2, 6),) * 2, (torch.zeros(3, 6),), (torch.zeros(()),)]
)
def test_tensors_that_are_not_the_batchs_are_refused(tensors: tuple[torch.Tensor, ...]) -> None:
    with pytest.raises(InternalError, match="malformed batch in frame 3"):
        records.unpack_batch(replace(batch_packet(), tensors=tensors))


def test_tree_of_a_malformed_record_is_refused() -> None:
    batch = build_batch(ForwardMode.VERIFY, [Row(1, [3, 4], 5, [1], 0, None, SpecRow((-1, 0)))])
    good = records.pack_batch(3, batch, StageOutput())
    records.unpack_batch(good)
    for spec in (SpecRow((-1,)), SpecRow((-1, 1)), SpecRow((-1, 0), scratch=-1)):
        bad = replace(batch, spec_info=SpecInfo(batch.spec_info.token_ids, (spec,)))  # type: ignore[union-attr]
        with pytest.raises(InternalError, match=r"malformed batch in frame 3: (parents|scratch)"):
            records.unpack_batch(records.pack_batch(3, bad, StageOutput()))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("query_lens", (1,)),
        ("query_lens", (3, -1)),
        ("context_lens", (5, 5)),
        ("context_lens", (-5,)),
        ("sampling", ()),
        ("scoring", (None, None)),
        ("states", (StateRow(), StateRow())),
        ("states", (StateRow(-1),)),
        ("positions", torch.tensor([5])),
        ("positions", torch.tensor([-1, 0])),
        ("token_ids", torch.tensor([3])),
        ("token_ids", torch.tensor([-3, 3])),
        ("slot_ids", torch.tensor([0, 0], dtype=torch.int32)),
        ("page_tables", torch.tensor([[-1]], dtype=torch.int32)),
        ("sampling", (SamplingRow(SamplingParams(), 7, output=OutputRow(1, -1, ())),)),
    ],
)
def test_count_or_sign_of_a_malformed_record_is_refused(field: str, value: object) -> None:
    changed: dict[str, Any] = {field: value}
    batch = build_batch(
        ForwardMode.PREFILL, [Row(1, [3, 4], 5, [1], 0, SamplingRow(SamplingParams(), 7))]
    )
    records.unpack_batch(records.pack_input(3, batch))
    with pytest.raises(InternalError, match="malformed batch in frame 3"):
        records.unpack_batch(records.pack_input(3, replace(batch, **changed)))


@given(data=st.binary(max_size=4), at=st.integers(0, 300))
def test_damaged_batch_is_refused_or_read(data: bytes, at: int) -> None:
    """`unpack_batch` raises only InternalError for any bytes."""
    packet = batch_packet()
    record = bytes(packet.record)
    with suppress(InternalError):
        records.unpack_batch(replace(packet, record=record[:at] + data + record[at + len(data) :]))


def test_layout_tells_apart_names_types_and_places() -> None:
    fields = [("a", int), ("b", int)]
    others = (
        [("b", int), ("a", int)],
        [("a", int), ("c", int)],
        [("a", int), ("b", float)],
        fields[:1],
    )
    layouts = [
        records.layout_digest([msgspec.defstruct("Toy", each, array_like=True)])
        for each in (fields, *others)
    ]
    layouts.append(
        records.layout_digest([msgspec.defstruct("Toy", fields, array_like=True)], schema=0)
    )
    assert len(set(layouts)) == len(layouts)
    assert records.layout_digest([msgspec.defstruct("Toy", fields, array_like=True)]) == layouts[0]
