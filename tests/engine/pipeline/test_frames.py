"""Frames between stages: what goes in comes out, bit for bit, and damage is noticed."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.contracts.model import StageOutput
from engine.core.batch import ForwardBatch, ForwardMode, OutputOpening, OutputRow, SamplingRow, ScoringRow
from engine.core.draft_trees import AcceptedNodes, SpecInfo, SpecRow, TokenTree, Verified
from engine.core.request import DrawnToken, SamplingParams, TokenLogprobs
from engine.core.rows import Row, build_batch
from engine.pipeline import frames
from runtime.errors import InternalError
from runtime.grammar import Grammar, GrammarKind

PARAMS = st.builds(
    SamplingParams, temperature=st.floats(0, 2), top_k=st.integers(0, 99), top_p=st.floats(0.1, 1),
    min_p=st.floats(0, 1), frequency_penalty=st.floats(-2, 2), presence_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.5, 2), seed=st.integers(0, 2**64 - 1),
    logit_bias=st.lists(st.tuples(st.integers(0, 9), st.floats(-5, 5)), max_size=3).map(tuple))
TOKENS = st.lists(st.integers(0, 999), max_size=4).map(tuple)
SAMPLING = st.none() | st.builds(
    SamplingRow, PARAMS, st.integers(0, 10**6), st.none() | st.integers(0, 20), TOKENS, st.integers(0, 10**6),
    st.none() | st.builds(OutputRow, st.integers(0, 2**40), st.integers(0, 10**6), TOKENS,
                          st.none() | st.builds(OutputOpening, TOKENS, st.none() | st.builds(
                              Grammar, st.sampled_from(GrammarKind), st.text())), st.booleans()))
SPEC_ROWS = st.builds(
    SpecRow, st.just(()), st.none() | st.builds(AcceptedNodes, st.integers(0, 99), TOKENS),
    st.none() | st.integers(0, 99),
    st.integers(0, 99), st.integers(0, 32))
TREES = st.lists(st.integers(0, 99), max_size=4).map(
    lambda tokens: TokenTree(tuple(tokens), tuple(range(-1, len(tokens) - 1))))


def batches() -> st.SearchStrategy[ForwardBatch]:
    row = st.builds(Row, key=st.integers(1, 2**40), token_ids=st.lists(st.integers(0, 99), min_size=1, max_size=5),
                    context_len=st.integers(0, 70), page_ids=st.lists(st.integers(1, 50), min_size=1, max_size=4),
                    slot_id=st.integers(0, 9), sampling=SAMPLING,
                    scoring=st.none() | st.builds(ScoringRow, TOKENS, st.integers(0, 20)))
    plain = st.builds(lambda batch, ended: replace(batch, ended_keys=ended), st.builds(
        build_batch, st.sampled_from(ForwardMode), st.lists(row, max_size=4)), TOKENS)
    chain = st.builds(lambda row, spec: replace(row, spec=replace(
        spec, parents=tuple(range(-1, len(row.token_ids) - 1)))), row, SPEC_ROWS)
    return plain | st.builds(build_batch, st.just(ForwardMode.VERIFY), st.lists(chain, max_size=4))


@given(batch=batches(), dtype=st.sampled_from([torch.float32, torch.bfloat16]), aux=st.sets(st.integers(0, 40)))
def test_batch_survives_the_wire(batch: ForwardBatch, dtype: torch.dtype, aux: set[int]) -> None:
    hidden = torch.randn(batch.num_tokens, 6).to(dtype)
    captured = {layer_id: torch.randn(batch.num_tokens, 6).to(dtype) for layer_id in aux}
    selected = torch.randint(-1, 99, (batch.num_tokens, 3), dtype=torch.int32) if len(aux) % 2 else None
    output = StageOutput(hidden=hidden, aux_hidden=captured, selected_keys=selected)
    packet = frames.pack_batch(7, batch, output)
    arrived = frames.unpack_batch(frames.unpack(bytes(packet.frame)), packet.tensors)
    incoming = arrived.incoming
    assert incoming.hidden is not None
    assert torch.equal(incoming.hidden, hidden)
    assert incoming.hidden.dtype is dtype
    assert incoming.aux_hidden.keys() == captured.keys()
    assert all(torch.equal(incoming.aux_hidden[layer_id], captured[layer_id]) for layer_id in aux)
    assert (incoming.selected_keys is None) == (selected is None)
    assert selected is None or torch.equal(torch.as_tensor(incoming.selected_keys), selected)
    for name in ("mode", "request_keys", "query_lens", "context_lens", "sampling", "scoring", "ended_keys"):
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


DRAWN = st.lists(st.builds(
    DrawnToken, st.integers(0, 2**31),
    st.none() | st.builds(TokenLogprobs, st.floats(-50, 0),
                          st.lists(st.tuples(st.integers(0, 99), st.floats(-50, 0)), max_size=3).map(tuple)),
    st.text(max_size=5), st.booleans()))


@given(tokens=DRAWN, scores=st.lists(DRAWN.map(tuple), max_size=3))
def test_result_survives_the_wire(tokens: list[DrawnToken], scores: list[tuple[DrawnToken, ...]]) -> None:
    frame = frames.unpack(bytes(frames.pack_result(9, tokens, scores=scores)))
    assert frame.sequence == 9
    assert frames.unpack_result(frame) == tokens
    assert frames.unpack_verified(frame) == []
    assert frames.unpack_scores(frame) == scores


@given(st.lists(st.builds(Verified, st.lists(st.integers(0, 31), min_size=1).map(tuple), TREES)))
def test_what_was_verified_survives_the_wire(verified: list[Verified]) -> None:
    tokens = [DrawnToken(node) for row in verified for node in row.accepted]
    frame = frames.unpack(bytes(frames.pack_result(9, tokens, verified)))
    assert frames.unpack_result(frame) == tokens
    assert frames.unpack_verified(frame) == verified


@given(cut=st.integers(0, 200), junk=st.binary(max_size=64))
def test_damage_is_an_error(cut: int, junk: bytes) -> None:
    whole = bytes(frames.pack_result(1, [DrawnToken(5, TokenLogprobs(-1.0, ((1, -2.0),)))]))
    with pytest.raises(InternalError):
        frames.unpack(whole[:min(cut, len(whole) - 1)])
    with pytest.raises(InternalError):
        frames.unpack(b"\0" + junk)
