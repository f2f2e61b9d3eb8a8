"""Captured forwards against eager ones on the device stack: the same bits, independent of the
capture and earlier batches."""

import functools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backends.cuda.flashinfer import FlashInferAttention
from engine.contracts.attention import AttentionGeometry
from engine.core.batch import ForwardBatch, ForwardMode, GraphBucket
from engine.graphs.buckets import decode_buckets, pad_batch, padding_alone, verify_buckets
from engine.kernels.device.cache import write_kv
from engine.memory.layout import CacheKind
from runtime.errors import StalePlanError
from testing.batches import unmarked
from tests.support.device.capture import CaptureError, RecordingCapture
from tests.support.device.captured_stage import (
    CPU,
    MAX_ROWS,
    NODES,
    PAGE_SIZE,
    DeviceStage,
    Twins,
    prefilled,
)
from tests.support.kernels.batches import Row, make_batch
from tests.support.kernels.flashinfer import FakeWrappers
from tests.support.models.tiny_models import HYBRID, LLAMA, VOCAB_SIZE

MIXED = {
    **HYBRID,
    "num_hidden_layers": 2,
    "linear_num_value_heads": 2,
    "layer_types": ["full_attention", "linear_attention"],
}
GEOMETRY = AttentionGeometry(num_heads=4, num_kv_heads=2, head_dim=16, page_size=16, scale=0.25)
CHAIN, FORK, BUSH = (-1, 0, 1, 2), (-1, 0, 0, 1), (-1, 0, 0, 0)


@pytest.mark.parametrize("config", [LLAMA, MIXED], ids=["attention", "hybrid"])
def test_s1_3_small_batches_and_changed_lengths_replay_in_big_graphs(
    config: dict[str, object],
) -> None:
    twins = prefilled(Twins(config), 3, 15, 16)
    for rows in ((0, 1), (0, 1, 2), (2,), (2, 0), (0, 1, 2)):
        twins.step(ForwardMode.DECODE, dict.fromkeys(rows, 1))
    assert twins.num_replays() == 5


def test_s1_10_stale_rows_of_the_stage_before_do_not_leak_into_a_verify() -> None:
    buckets = verify_buckets(MAX_ROWS, NODES, is_masked=True)
    twins = prefilled(
        Twins(MIXED, cuts=(1,), buckets=buckets, capture_layers=frozenset({0, 1})), 3, 15, 16
    )
    steps: list[dict[int, tuple[int, ...]]] = [
        {0: CHAIN, 1: FORK, 2: BUSH},
        {1: (-1, 0)},
        {2: FORK, 0: (-1,)},
        {0: (-1,), 1: (-1,)},
    ]
    for shapes in steps:
        twins.step(
            ForwardMode.VERIFY,
            {key: len(parents) for key, parents in shapes.items()},
            parents=shapes,
        )
    assert twins.num_replays() == 8


def test_chains_are_verified_by_causal_graphs_and_trees_then_eagerly() -> None:
    twins = prefilled(Twins(LLAMA, buckets=verify_buckets(MAX_ROWS, NODES, is_masked=False)), 3, 20)
    twins.step(ForwardMode.VERIFY, {0: 4, 1: 2}, parents={0: CHAIN, 1: (-1, 0)})
    assert twins.num_replays() == 1
    twins.step(ForwardMode.VERIFY, {0: 4, 1: 4}, parents={0: CHAIN, 1: FORK})
    assert twins.num_replays() == 1


def test_rows_beyond_the_largest_bucket_and_prompts_run_eagerly() -> None:
    twins = prefilled(Twins(LLAMA), *range(1, 5))
    twins.step(ForwardMode.DECODE, dict.fromkeys(range(4), 1))
    assert twins.num_replays() == 0
    twins.step(ForwardMode.DECODE, dict.fromkeys(range(3), 1))
    assert twins.num_replays() == 1


def test_only_rows_that_draw_have_logits() -> None:
    twins = prefilled(Twins(LLAMA), 3, 20, 5)
    twins.step(ForwardMode.DECODE, {0: 1, 1: 1, 2: 1}, silent=(1,))


def test_s1_3_a_replay_is_planned_once_and_a_planned_batch_runs_eagerly() -> None:
    twins = prefilled(Twins({**LLAMA, "num_hidden_layers": 1}), 3, 20)
    (stage,) = twins.captured
    planned = stage.attention.num_plans
    twins.step(ForwardMode.DECODE, {0: 1, 1: 1})
    assert (stage.attention.num_plans, stage.executor.num_plans) == (planned + 1, 2)
    batch = twins.sequences.batch(ForwardMode.DECODE, {0: 1})
    stage.attention.plan(batch)
    stage.executor.run(batch)
    assert (twins.num_replays(), stage.attention.num_plans) == (1, planned + 2)


def captured_of(stage: DeviceStage) -> RecordingCapture:
    assert isinstance(stage.capture, RecordingCapture)
    return stage.capture


def decode_batch(twins: Twins, *rows: int) -> ForwardBatch:
    return twins.sequences.batch(ForwardMode.DECODE, dict.fromkeys(rows, 1))


def test_s1_3_a_replay_without_a_plan_of_its_own_is_refused() -> None:
    twins = prefilled(Twins({**LLAMA, "num_hidden_layers": 1}), 3, 5)
    (stage,) = twins.captured
    assert stage.graphs is not None
    captured = {bucket.max_rows: forward for bucket, forward in stage.graphs._captured.items()}
    padded = {
        rows: pad_batch(decode_batch(twins, *range(rows)), GraphBucket(ForwardMode.DECODE, rows))
        for rows in (1, 2)
    }
    with pytest.raises(StalePlanError, match="not planned by"):
        captured[1].replay(padded[1])
    for batch in padded.values():
        stage.attention.plan(batch)
        stage.recurrent.prepare(batch)
    with pytest.raises(StalePlanError, match="captured for decode of 2 x 1"):
        captured[2].replay(padded[1])
    with torch.inference_mode():
        captured[1].replay(padded[1])
        captured[2].replay(padded[2])
    for rows in (1, 2):
        with pytest.raises(StalePlanError, match="one replay"):
            captured[rows].replay(padded[rows])
    stage.attention.plan(pad_batch(decode_batch(twins, 0), GraphBucket(ForwardMode.DECODE, 1)))
    with pytest.raises(StalePlanError, match="another batch since"):
        captured[1].replay(padded[1])


def test_s1_3_a_batch_planned_for_a_graph_is_not_run_eagerly() -> None:
    twins = Twins({**LLAMA, "num_hidden_layers": 1})
    (stage,) = twins.captured
    batch = pad_batch(decode_batch(twins, 0), GraphBucket(ForwardMode.DECODE, 2))
    stage.attention.plan(batch)
    batch.graph_bucket = None
    with pytest.raises(StalePlanError, match="planned for decode of 2 x 1"):
        stage.attention.check_current(batch)


def test_a_forward_that_plans_or_reads_values_is_not_captured() -> None:
    """The fake fails if a real capture would fail, or would silently be wrong."""
    planner, values = (
        FlashInferAttention(
            kv_pools={}, geometry=GEOMETRY, wrappers=FakeWrappers(), device=CPU, write_kv=write_kv
        ),
        torch.arange(4),
    )
    capture = RecordingCapture([planner])
    with pytest.raises((AssertionError, CaptureError)):
        capture.capture("planning", lambda: planner.plan(make_batch(ForwardMode.DECODE, [Row(1)])))
    for read in (lambda: values[0].item(), lambda: torch.tensor([3]), lambda: values.nonzero()):
        with pytest.raises(CaptureError, match="to or from the host"):
            capture.capture("reading", read)  # type: ignore[arg-type]
    length = [2]
    graph = capture.capture("live sizes", lambda: values[: length[0]].add_(1))  # type: ignore[arg-type]
    graph.replay()
    length[0] = 3
    with pytest.raises(AssertionError, match="what it was captured with"):
        graph.replay()


class TwoWindows:
    """An `AttentionBackend` over two: even layers see all, odd ones a window. Each plans for
    itself."""

    def __init__(self, *, buckets: Sequence[GraphBucket]) -> None:
        self.pools = {layer: torch.full((9, 2, 2, 16, 16), float("nan")) for layer in range(4)}
        self.backends = [
            FlashInferAttention(
                kv_pools={layer: pool for layer, pool in self.pools.items() if layer % 2 == odd},
                device=CPU,
                geometry=replace(GEOMETRY, window=3 if odd else None),
                wrappers=FakeWrappers(),
                write_kv=write_kv,
            )
            for odd in (0, 1)
        ]
        for backend in self.backends:
            backend.reserve(buckets)

    def forward(self, batches: Sequence[ForwardBatch], x: torch.Tensor) -> torch.Tensor:
        for layer in self.pools:
            q = x[:, None].expand(-1, 4, -1).contiguous()
            x = (
                x
                + self.backends[layer % 2].run(layer, q, q[:, :2], q[:, :2], batches[layer % 2])[
                    :, 0
                ]
            )
        return x


def test_s1_3_both_window_wrappers_are_planned_before_each_replay() -> None:
    """The case where other engines planned one of several wrappers: right in row 0 and wrong from
    row 1 on."""
    bucket = GraphBucket(ForwardMode.DECODE, 3)
    captured, eager = TwoWindows(buckets=[bucket]), TwoWindows(buckets=[bucket])
    x, out = torch.zeros(3, 16), torch.zeros(3, 16)
    marked = [padding_alone(bucket) for _ in captured.backends]
    for backend, batch in zip(captured.backends, marked, strict=True):
        backend.plan(batch)
    graph = RecordingCapture(captured.backends).capture(
        "two windows",
        lambda: out.copy_(captured.forward(marked, x)),  # type: ignore[arg-type]
    )
    generator = torch.Generator().manual_seed(0)
    for step in range(20):
        rows = (0, 1) if step % 3 else (1, 0, 2)
        batch = make_batch(
            ForwardMode.DECODE, [Row(1, step + row, (2 * row + 1, 2 * row + 2)) for row in rows]
        )
        for pools in (
            captured.pools,
            eager.pools,
        ):  # what earlier steps left is the same on both sides
            for pool in pools.values():
                pool.nan_to_num_(0.5)
        x.fill_(float("nan"))
        x[: len(rows)] = torch.randn(len(rows), 16, generator=generator)
        for backend, mark in zip(captured.backends, marked, strict=True):
            padded = pad_batch(batch, bucket)
            backend.plan(padded)
            mark.mark_forward_metadata_ready(backend, plan=backend.check_current(padded))
        graph.replay()
        batches = [unmarked(batch) for _ in eager.backends]
        for backend, each in zip(eager.backends, batches, strict=True):
            backend.plan(each)
        assert torch.equal(out[: len(rows)], eager.forward(batches, x[: len(rows)].clone()))


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_random_batches_are_the_same_captured_and_eager(data: st.DataObject) -> None:
    twins = random_twins()
    rows = data.draw(st.lists(st.sampled_from(range(4)), min_size=1, max_size=4, unique=True))
    if data.draw(st.booleans()):
        room = {row: 60 - twins.sequences.lengths.get(row, 0) for row in rows}
        shapes = {
            row: tuple(
                data.draw(st.integers(-1 if node == 0 else 0, node - 1))
                for node in range(data.draw(st.integers(1, NODES)))
            )
            for row in rows
            if room[row] >= NODES
        }
        if shapes:
            twins.step(
                ForwardMode.VERIFY,
                {row: len(shape) for row, shape in shapes.items()},
                parents=shapes,
            )
    elif all(twins.sequences.lengths.get(row, 0) < 60 for row in rows):
        twins.step(ForwardMode.DECODE, dict.fromkeys(rows, 1))


@functools.cache
def random_twins() -> Twins:
    """Build twins that all examples share, so that each meets leftovers of earlier ones."""
    buckets = (*decode_buckets(MAX_ROWS), *verify_buckets(MAX_ROWS, NODES, is_masked=True))
    return prefilled(Twins({**LLAMA, "num_hidden_layers": 2}, buckets=buckets), 3, 15, 16, 1)


def test_the_number_of_graphs_and_their_memory_are_bounded() -> None:
    """A graph per doubling of rows and kind; buffers grow with the pool's pages and the largest
    bucket, not with what any request may hold."""
    max_rows, nodes = 6, 3
    buckets = (*decode_buckets(max_rows), *verify_buckets(max_rows, nodes, is_masked=True))
    assert [bucket.max_rows for bucket in buckets] == [1, 2, 4, 6] * 2
    (stage,) = Twins({**LLAMA, "num_hidden_layers": 1}, buckets=buckets).captured
    assert stage.graphs is not None
    assert stage.graphs.num_captured == len(captured_of(stage).graphs) == len(buckets)
    (pool,) = stage.of(CacheKind.KV).values()
    assert isinstance(stage.wrappers, FakeWrappers)
    for wrapper in stage.wrappers.made:
        if wrapper.graph is not None:
            ints = (
                5 * (wrapper.graph.num_rows + 1)
                + len(pool)
                + max_rows * nodes
                + wrapper.graph.num_rows
            )
            bits = nodes * len(pool) * PAGE_SIZE + (max_rows * nodes) ** 2
            assert 0 < wrapper.num_bytes <= 4 * ints + bits // 8 + wrapper.graph.num_rows + 1
    outputs = stage.graphs._outputs
    assert {name: tuple(tensor.shape) for name, tensor in outputs.items()} == {
        "logits": (max_rows * nodes, VOCAB_SIZE)
    }
