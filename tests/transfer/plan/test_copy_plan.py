"""Every split works with every other: each record of every layer moves exactly once, and both sides
agree on the plan."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.layer_range import LayerRange, TensorRank
from engine.memory.layout import CacheKind, CacheSpec
from runtime.errors import IncompatiblePeerError
from tests.support.transfer.handoff import hybrid_specs
from transfer.plan.copy_plan import (
    MAX_RUN_BYTES,
    CopyPlan,
    check_plan,
    plan_destination,
    plan_lane,
)
from transfer.plan.handoff_terms import DestinationTerms, SourceTerms, StageEndpoint
from transfer.transport.authenticator import new_key

PAGE_SIZE = 4
TAG_BASE = 0xABCDEF0123_FFFFFD  # three below the end of its prefix


def stages_of(num_layers: int, cuts: set[int]) -> tuple[StageEndpoint, ...]:
    bounds = [0, *sorted(cuts), num_layers]
    return tuple(
        StageEndpoint(LayerRange(start, end), b"address", f"process-{start}")
        for start, end in pairwise(bounds)
    )


def terms(
    page_ids: tuple[int, ...],
    num_tokens: int,
    *,
    num_layers: int = 4,
    cuts: set[int] | None = None,
    chunk_tokens: int = 8,
) -> SourceTerms:
    stages = stages_of(num_layers, cuts or set())
    return SourceTerms(
        "c", "text", PAGE_SIZE, num_tokens, chunk_tokens, page_ids, 3, stages, sends_rest=True
    )


def destination_of(
    source: SourceTerms,
    page_ids: tuple[int, ...],
    specs: tuple[CacheSpec, ...],
    *,
    num_layers: int = 4,
    cuts: set[int] | None = None,
    epoch: int = 0,
    held_tokens: int = 0,
) -> DestinationTerms:
    return plan_destination(
        source,
        session_id="s",
        epoch=epoch,
        tag_base=TAG_BASE,
        key=new_key(),
        page_ids=page_ids,
        slot_id=5,
        stages=stages_of(num_layers, cuts or set()),
        specs=specs,
        held_tokens=held_tokens,
    )


@st.composite
def handoffs(draw: st.DrawFn) -> tuple[SourceTerms, DestinationTerms, tuple[CacheSpec, ...]]:
    num_layers = draw(st.integers(1, 9))
    specs = hybrid_specs(num_layers, page_size=PAGE_SIZE)
    num_tokens = draw(st.integers(1, 60))
    num_pages = -(-num_tokens // PAGE_SIZE)
    pages = st.lists(st.integers(1, 40), min_size=num_pages, max_size=num_pages, unique=True).map(
        tuple
    )
    runs = st.integers(1, 20).map(lambda first: tuple(range(first, first + num_pages)))
    cuts = st.sets(st.integers(1, max(1, num_layers - 1)), max_size=num_layers - 1)
    source = terms(
        draw(st.one_of(pages, runs)),
        num_tokens,
        num_layers=num_layers,
        cuts=draw(cuts),
        chunk_tokens=draw(st.sampled_from([1, 3, 4, 6, 8, 12, 16, 100])),
    )
    dest_pages = draw(st.one_of(pages, runs))
    held_tokens = draw(st.integers(0, num_pages - 1)) * PAGE_SIZE
    return (
        source,
        destination_of(
            source,
            dest_pages,
            specs,
            num_layers=num_layers,
            cuts=draw(cuts),
            held_tokens=held_tokens,
        ),
        specs,
    )


@given(handoffs())
def test_every_record_moves_once_and_none_that_is_held(
    handoff: tuple[SourceTerms, DestinationTerms, tuple[CacheSpec, ...]],
) -> None:
    source, destination, specs = handoff
    moved: Counter[tuple[int, CacheKind, int, int]] = Counter()
    for source_stage, sender in enumerate(source.stages):
        for dest_stage, receiver in enumerate(destination.stages):
            for item in plan_lane(source, destination, specs, source_stage, dest_stage):
                assert item.layer_id in sender.layers
                assert item.layer_id in receiver.layers
                moved.update(
                    (item.layer_id, item.kind, item.source_index + i, item.dest_index + i)
                    for i in range(item.num_records)
                )
    wanted: Counter[tuple[int, CacheKind, int, int]] = Counter()
    for spec in specs:
        pages = list(zip(source.page_ids, destination.page_ids, strict=True))[
            destination.held_tokens // PAGE_SIZE :
        ]
        pairs = pages if spec.kind.is_paged else [(source.slot_id, destination.slot_id)]
        wanted.update((spec.layer_id, spec.kind, theirs, ours) for theirs, ours in pairs)
    assert moved == wanted


@given(handoffs())
def test_items_wait_for_their_last_token_and_never_span_a_chunk_border(
    handoff: tuple[SourceTerms, DestinationTerms, tuple[CacheSpec, ...]],
) -> None:
    source, destination, specs = handoff
    position = {page_id: i for i, page_id in enumerate(source.page_ids)}
    for stage in range(len(source.stages)):
        for lane in CopyPlan(source, destination, specs).lanes_from(stage):
            for item in lane.items:
                if not item.kind.is_paged:
                    assert item.ready_tokens == source.num_tokens
                    continue
                first = position[item.source_index] * PAGE_SIZE
                end = min(first + item.num_records * PAGE_SIZE, source.num_tokens)
                assert item.ready_tokens == end
                if item.num_records > 1:
                    assert first // source.chunk_tokens == (end - 1) // source.chunk_tokens


@given(handoffs())
def test_both_sides_number_messages_equally_without_repeated_tags(
    handoff: tuple[SourceTerms, DestinationTerms, tuple[CacheSpec, ...]],
) -> None:
    source, destination, specs = handoff
    plan = check_plan(source, destination, specs)
    sent = {
        (lane.source_stage, lane.dest_stage): lane
        for stage in range(len(source.stages))
        for lane in plan.lanes_from(stage)
    }
    for dest_stage in range(len(destination.stages)):
        lanes = plan.lanes_to(dest_stage)
        assert all(sent.pop((lane.source_stage, lane.dest_stage)) == lane for lane in lanes)
        tags = [lane.tag(index) for lane in lanes for index in range(len(lane.items) + 1)]
        assert [lane.trailer_tag for lane in lanes] == [lane.tag(len(lane.items)) for lane in lanes]
        # From the base on, and after the end of its prefix from the prefix's first one on.
        prefix = TAG_BASE - 0xFFFFFD
        assert (
            tags
            == [TAG_BASE, TAG_BASE + 1, TAG_BASE + 2, *range(prefix, prefix + len(tags))][
                : len(tags)
            ]
        )
    assert not sent


def test_neighbors_on_both_sides_travel_together() -> None:
    specs = (CacheSpec(0, CacheKind.KV, (8,), "bfloat16", 2),)
    source = terms((1, 2, 3, 7, 8), 18, num_layers=1, chunk_tokens=100)
    destination = destination_of(source, (11, 12, 14, 15, 16), specs, num_layers=1)
    items = plan_lane(source, destination, specs, 0, 0)
    assert [
        (item.source_index, item.dest_index, item.num_records, item.ready_tokens) for item in items
    ] == [(1, 11, 2, 8), (3, 14, 1, 12), (7, 15, 2, 18)]


def test_runs_are_bounded() -> None:
    specs = (
        CacheSpec(0, CacheKind.KV, (MAX_RUN_BYTES // 4,), "uint8", 1),
        CacheSpec(1, CacheKind.KV, (MAX_RUN_BYTES + 1,), "uint8", 1),
    )
    source = terms(tuple(range(1, 11)), 40, num_layers=2, chunk_tokens=1000)
    destination = destination_of(source, tuple(range(1, 11)), specs, num_layers=2)
    items = plan_lane(source, destination, specs, 0, 0)
    assert [item.num_records for item in items] == [4, 4, 2] + [1] * 10


def test_a_lane_without_common_layers_is_empty() -> None:
    specs = hybrid_specs(4)
    source = terms((1,), 4, cuts={2})
    destination = destination_of(source, (1,), specs, cuts={2})
    assert plan_lane(source, destination, specs, 0, 1) == ()
    assert [lane.source_stage for lane in CopyPlan(source, destination, specs).lanes_to(1)] == [1]


def ranks_of(size: int) -> tuple[StageEndpoint, ...]:
    """Return one stage of four layers and `size` ranks."""
    return tuple(
        StageEndpoint(LayerRange(0, 4), b"address", f"process-{rank}", TensorRank(rank, size))
        for rank in range(size)
    )


THREE_HEADS = CacheSpec(
    1, CacheKind.KV, (2, 3, PAGE_SIZE, 8), "bfloat16", 2, split_axis=1, blocks=(3,), may_repeat=True
)


@pytest.mark.parametrize(("source_size", "dest_size"), [(2, 3), (3, 2), (1, 3), (6, 2), (3, 6)])
def test_ranks_of_any_two_numbers_exchange_every_head_once(
    source_size: int, dest_size: int
) -> None:
    source = replace(terms((1, 2, 3), 9), stages=ranks_of(source_size), slot_id=0)
    destination = plan_destination(
        source,
        session_id="s",
        epoch=0,
        tag_base=TAG_BASE,
        key=new_key(),
        page_ids=(4, 5, 6),
        slot_id=0,
        stages=ranks_of(dest_size),
        specs=(THREE_HEADS,),
    )
    plan = CopyPlan(source, destination, (THREE_HEADS,))
    sent = [lane for stage in range(source_size) for lane in plan.lanes_from(stage)]
    for dest in range(dest_size):
        lanes = plan.lanes_to(dest)
        assert list(lanes) == [lane for lane in sent if lane.dest_stage == dest]
        own = THREE_HEADS.of_rank(TensorRank(dest, dest_size))
        assert sum(item.num_bytes for lane in lanes for item in lane.items) == 3 * own.record_bytes
        tags = [lane.tag(index) for lane in lanes for index in range(len(lane.items) + 1)]
        assert len(set(tags)) == len(tags)


def test_more_ranks_than_heads_are_refused_with_their_side() -> None:
    source = replace(terms((1, 2, 3), 9), stages=ranks_of(4))
    with pytest.raises(
        IncompatiblePeerError, match=r"source\.stages: --tp 4 is more than the 3 kv"
    ):
        destination_of(source, (4, 5, 6), (THREE_HEADS,))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_ids": (1, 2)}, "source.page_ids: 9 tokens in pages of 4 need 3 pages, got 2"),
        ({"page_ids": (1, 2, 1)}, "source.page_ids names a page twice"),
        ({"page_ids": (1, 0, 2)}, "page 0; pages start at 1"),
        ({"slot_id": 0}, "source.slot_id is 0"),
        ({"stages": stages_of(3, set())}, "source.stages 0-3: layer 3 is on 0 stages"),
        ({"stages": (*stages_of(4, set()), *stages_of(4, {1})[1:])}, "layer 1 is on 2 stages"),
    ],
)
def test_a_source_that_does_not_fit_is_refused(change: dict[str, object], message: str) -> None:
    specs = hybrid_specs(4)
    source = replace(terms((1, 2, 3), 9), **change)  # type: ignore[arg-type]
    with pytest.raises(IncompatiblePeerError, match=message):
        destination_of(source, (4, 5, 6), specs)


@pytest.mark.parametrize(
    "change",
    [
        {"page_ids": (4, 5, 7)},
        {"held_tokens": 4},
        {"slot_id": 6},
        {"epoch": 1},
        {"session_id": "t"},
        {"tag_base": 1 << 32},
        {"stages": stages_of(4, {1})},
        {"plan_digest": ""},
    ],
)
def test_sides_that_derive_different_plans_refuse_each_other(change: dict[str, object]) -> None:
    specs = hybrid_specs(4)
    source = terms((1, 2, 3), 9)
    destination = destination_of(source, (4, 5, 6), specs)
    check_plan(source, destination, specs)
    with pytest.raises(IncompatiblePeerError, match="derives copy plan"):
        check_plan(source, replace(destination, **change), specs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("held_tokens", "sends_rest", "message"),
    [
        (3, True, "held_tokens is 3; it must be whole pages of 4 tokens"),
        (12, True, "fewer than the 9 of the prompt"),
        (8, False, "held_tokens is 8, and the source sends every page"),
    ],
)
def test_held_tokens_must_be_whole_pages_and_need_a_capable_source(
    held_tokens: int,
    sends_rest: bool,  # noqa: FBT001
    message: str,
) -> None:
    source = replace(terms((1, 2, 3), 9), sends_rest=sends_rest)
    with pytest.raises(IncompatiblePeerError, match=message):
        destination_of(source, (4, 5, 6), hybrid_specs(4), held_tokens=held_tokens)


def test_names_describe_item_and_place() -> None:
    specs = hybrid_specs(2)
    source = terms((1, 2, 3), 9, num_layers=2, chunk_tokens=100)
    items = plan_lane(source, destination_of(source, (4, 5, 6), specs, num_layers=2), specs, 0, 0)
    assert [item.name for item in items] == [
        "layer 0 conv slot 5",
        "layer 0 state slot 5",
        "layer 1 kv pages 4-6",
    ]
