"""Padding to a captured shape: real rows as they were, the rest without a past and owning
nothing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.batch import ForwardMode, GraphBucket
from engine.core.draft_trees import SpecInfo, SpecRow
from engine.core.rows import Row, build_batch
from engine.graphs.buckets import (
    bucket_for,
    decode_buckets,
    extend_buckets,
    pad_batch,
    padding_alone,
    row_counts,
    verify_buckets,
)
from engine.memory.layout import NULL_INDEX
from engine.memory.static import StaticInts

MAX_ROWS, NODES = 6, 5


@pytest.mark.parametrize(
    ("max_rows", "counts"),
    [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (16, (1, 2, 4, 8, 16)), (17, (1, 2, 4, 8, 16, 17))],
)
def test_rows_double_up_to_the_most(max_rows: int, counts: tuple[int, ...]) -> None:
    assert row_counts(max_rows) == counts
    assert [bucket.num_rows for bucket in decode_buckets(max_rows)] == list(counts)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_padded_batch_is_its_rows_and_then_rows_that_own_nothing(data: st.DataObject) -> None:
    mode = data.draw(st.sampled_from([ForwardMode.DECODE, ForwardMode.VERIFY, ForwardMode.DRAFT]))
    masked = data.draw(st.booleans())
    buckets = {
        ForwardMode.DECODE: decode_buckets(MAX_ROWS),
        ForwardMode.DRAFT: extend_buckets(MAX_ROWS, NODES),
        ForwardMode.VERIFY: verify_buckets(MAX_ROWS, NODES, is_masked=masked),
    }[mode]
    longest = 1 if mode is ForwardMode.DECODE else NODES
    counts = data.draw(st.lists(st.integers(1, longest), min_size=1, max_size=MAX_ROWS))
    batch = build_batch(
        mode,
        [
            Row(
                key,
                [9] * count,
                data.draw(st.integers(0, 40)),
                [3 * key + 1, 3 * key + 2, 3 * key + 3],
                key + 1,
                None,
                SpecRow(tuple(range(-1, count - 1))) if mode is ForwardMode.VERIFY else None,
            )
            for key, count in enumerate(counts)
        ],
    )
    bucket = bucket_for(batch, buckets)
    assert bucket is not None
    assert bucket.max_rows == next(rows for rows in row_counts(MAX_ROWS) if rows >= len(counts))
    padded, num_rows = pad_batch(batch, bucket), batch.num_rows
    assert (padded.num_rows, padded.num_tokens) == (bucket.num_rows, bucket.num_tokens)
    assert sum(padded.query_lens) == bucket.num_tokens
    assert padded.graph_bucket is bucket
    assert padded.needs_forward_metadata_init()
    for name in ("request_keys", "query_lens", "context_lens", "sampling"):
        assert getattr(padded, name)[:num_rows] == getattr(batch, name)
    assert torch.equal(padded.positions[: batch.num_tokens], batch.positions)
    assert torch.equal(padded.page_tables[:num_rows, :3], batch.page_tables)
    assert set(padded.context_lens[num_rows:]) <= {0}
    assert padded.page_tables.shape[1] >= max([0, *padded.query_lens[num_rows:]]), "a page each"
    assert (padded.page_tables[num_rows:] == NULL_INDEX).all()
    assert (padded.slot_ids[num_rows:] == NULL_INDEX).all()
    if mode is ForwardMode.VERIFY:
        assert isinstance(padded.spec_info, SpecInfo)
        assert [len(row.parents) for row in padded.spec_info.rows] == list(padded.query_lens)
        assert masked or padded.spec_info.is_chain


def test_batches_that_fit_no_bucket_find_none() -> None:
    buckets = (*decode_buckets(2), *verify_buckets(2, 3, is_masked=False))

    def batch(mode: ForwardMode, *parents: tuple[int, ...]) -> GraphBucket | None:
        return bucket_for(
            build_batch(
                mode,
                [
                    Row(key, [1] * len(own), 0, [1 + key], 0, None, SpecRow(own))
                    for key, own in enumerate(parents)
                ],
            ),
            buckets,
        )

    assert batch(ForwardMode.DECODE, (-1,), (-1,)) == GraphBucket(ForwardMode.DECODE, 2)
    assert batch(ForwardMode.VERIFY, (-1, 0, 1)) == GraphBucket(ForwardMode.VERIFY, 1, 3)
    assert batch(ForwardMode.DECODE, (-1,), (-1,), (-1,)) is None, "too many rows"
    assert batch(ForwardMode.VERIFY, (-1, 0, 1, 2)) is None, "a row too long"
    assert batch(ForwardMode.VERIFY, (-1, 0, 0)) is None, "a tree where only chains were captured"
    assert batch(ForwardMode.PREFILL, (-1,)) is None
    assert batch(ForwardMode.DECODE) is None, "no rows"
    assert bucket_for(padding_alone(buckets[0]), buckets[:1]) == buckets[0]


def test_static_memory_keeps_its_place_and_nothing_of_before() -> None:
    static = StaticInts({"a": 4, "b": 2}, torch.device("cpu"))
    a, b = static["a"], static["b"]
    static.refill({"a": torch.tensor([1, 2, 3, 4]), "b": torch.tensor([True])})
    assert (a.tolist(), b.tolist()) == ([1, 2, 3, 4], [1, 0])
    static.refill({"a": torch.tensor([7])})
    assert (a.tolist(), b.tolist()) == ([7, 0, 0, 0], [0, 0])
    assert a.data_ptr() == static["a"].data_ptr()
