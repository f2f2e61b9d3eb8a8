"""The host's attention kernel: what it computes, what changes no bit of it, and what happens when
it cannot."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.kernels.host.attention import paged_attention
from engine.kernels.host.attention.paged_attention import attend_in_place
from engine.kernels.host.attention.small_batch import heads_of_item, most_rows
from engine.kernels.host.codegen.amx import has_tiles
from engine.kernels.host.codegen.compiled import Team
from engine.kernels.host.codegen.vectors import has_pair_products
from engine.kernels.rows_in_place import NO_WINDOW, RowsInPlace
from runtime.errors import InternalError

FORMS = [
    "fp32",
    "bf16",
    *(["bf16 without the matrix unit"] if has_tiles() else []),
]  # a kernel each
page_sizes = st.sampled_from([1, 4, 16, 64, 100, 128])
head_dims = st.sampled_from([4, 24, 33, 64, 80, 128, 200])


AT_THE_SAME_TIME = """
from concurrent.futures import ThreadPoolExecutor
import torch
from engine.kernels.host.codegen.compiled import Team
from engine.kernels.host.codegen.vectors import (has_pair_products)
from engine.kernels.host.attention.paged_attention import attend_in_place
from tests.engine.kernels.test_paged_attention import random_tensor, rows_of

torch.set_num_threads(1)
cases = []
for contexts, counts, tile in (([20, 3], [5, 1], 5), ([100], [60], 60), ([3], [1], 1), ([7] * 8, [1] * 8, 1)):
    plan = rows_of(contexts, counts, 16, tile=tile)
    for dim in (32, 64, 128):
        pages = random_tensor(plan.tables.numel() + 1, 2, 1, 16, dim, dtype=torch.bfloat16, seed=1)
        cases.append((pages, random_tensor(sum(counts), 2, dim, dtype=torch.bfloat16, seed=2), plan))
expected = [attend_in_place(*case, 0.2, Team()) for case in cases]

def repeat(_: int) -> bool:
    return all(torch.equal(attend_in_place(*case, 0.2, Team()), one)
               for _ in range(200) for case, one in zip(cases, expected, strict=True))

with ThreadPoolExecutor(4) as pool:
    print("the same bits" if all(pool.map(repeat, range(4))) else "other bits")
"""


class Idle(Team):
    """Threads that run nothing."""

    def run(self, function: int, argument: int, *, num_parts: int) -> None:
        pass


@pytest.fixture(params=FORMS)
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    if request.param == "bf16 without the matrix unit":
        monkeypatch.setattr(paged_attention, "has_tiles", lambda: False)
    return torch.float32 if request.param == "fp32" else torch.bfloat16


def rows_of(
    contexts: list[int],
    counts: list[int],
    page_size: int,
    *,
    tile: int = 5,
    window: int = NO_WINDOW,
) -> RowsInPlace:
    """Return rows on their own pages, in descending order without page 0."""
    width = (
        max(
            -(-(context + count) // page_size)
            for context, count in zip(contexts, counts, strict=True)
        )
        or 1
    )
    tables = torch.arange(len(contexts) * width, 0, -1, dtype=torch.int32).view(
        len(contexts), width
    )
    tiles: list[tuple[int, int, int]] = []
    positions: list[int] = []
    for row, (context, count) in enumerate(zip(contexts, counts, strict=True)):
        tiles += [
            (row, len(positions) + start, min(tile, count - start))
            for start in range(0, count, tile)
        ]
        positions += range(context, context + count)
    ends = [context + count for context, count in zip(contexts, counts, strict=True)]
    return RowsInPlace(
        tables,
        torch.tensor(tiles, dtype=torch.int32).view(-1, 3),
        torch.tensor(positions, dtype=torch.int32),
        torch.tensor(ends, dtype=torch.int32),
        torch.empty(len(positions), 0, dtype=torch.long),
        longest_tile=max((count for *_, count in tiles), default=0),
        window=window,
    )


def random_tensor(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def filled(pages: Tensor, table: Tensor, cached: Tensor, begin: int = 0) -> None:
    """Write `cached` [2, num_kv_heads, keys, D] into the row's pages, from key `begin` on."""
    for key in range(begin, cached.shape[2]):
        pages[table[key // pages.shape[3]], :, :, key % pages.shape[3]] = cached[:, :, key]


def truth(
    queries: Tensor,
    cached: Tensor,
    context: int,
    scale: float,
    window: int = NO_WINDOW,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute softmax attention in fp64. queries: [n, heads, D], of which the first sees context +
    1 keys, or window + 1. sinks: [heads], one more score each."""
    keys, values = cached.double().repeat_interleave(queries.shape[1] // cached.shape[1], 1)
    scores = torch.einsum("qhd,hkd->hqk", queries.double(), keys) * scale
    ahead = torch.arange(scores.shape[2]) - context - torch.arange(len(queries))[:, None]
    hidden = (ahead > 0) | (ahead < -window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        own = (sinks.double() * scale)[:, None, None].expand(-1, len(queries), 1)
        scores = torch.cat([scores, own], -1)
    return torch.einsum("hqk,hkd->qhd", scores.softmax(-1)[..., : keys.shape[1]], values)


@settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    page_size=page_sizes,
    num_kv_heads=st.integers(1, 3),
    share=st.integers(1, 8),
    head_dim=head_dims,
    tile=st.sampled_from([1, 7, 40]),
    window=st.sampled_from([NO_WINDOW, 0, 7, 63, 64, 100]),
    rows=st.lists(st.tuples(st.integers(0, 150), st.integers(0, 45)), min_size=1, max_size=4),
    has_sinks=st.booleans(),
)
def test_it_computes_the_definition_from_written_keys_alone(
    dtype: torch.dtype,
    page_size: int,
    num_kv_heads: int,
    share: int,
    head_dim: int,
    tile: int,
    window: int,
    rows: list[tuple[int, int]],
    *,
    has_sinks: bool,
) -> None:
    contexts, counts = [context for context, _ in rows], [count for _, count in rows]
    plan = rows_of(contexts, counts, page_size, tile=tile, window=window)
    pages = torch.full(
        (plan.tables.numel() + 1, 2, num_kv_heads, page_size, head_dim), float("nan"), dtype=dtype
    )
    queries = random_tensor(sum(counts), num_kv_heads * share, head_dim, dtype=dtype, seed=1)
    sinks = None
    if has_sinks:
        sinks = random_tensor(num_kv_heads * share, dtype=torch.float32, seed=9) * 20
    expected, first = [], 0
    for row, (context, count) in enumerate(rows):
        cached = random_tensor(
            2, num_kv_heads, context + count, head_dim, dtype=dtype, seed=2 + row
        )
        filled(pages, plan.tables[row], cached, max(0, context - window))
        mine = queries[first : first + count]
        expected.append(truth(mine, cached, context, 0.2, window, sinks))
        first += count
    out = attend_in_place(pages, queries, plan, 0.2, Team(), sinks).double()
    if dtype is torch.float32:
        torch.testing.assert_close(out, torch.cat(expected), rtol=1e-4, atol=1e-5)
    else:
        torch.testing.assert_close(out, torch.cat(expected), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("page_size", "share", "head_dim", "window", "sink"),
    [
        (16, 2, 128, NO_WINDOW, None),
        (64, 7, 80, 1000, 0.5),
        (128, 1, 24, NO_WINDOW, 12.0),
        (4, 4, 64, 70, None),
    ],
)
def test_a_long_row_has_the_same_bits_in_any_tiles_and_the_right_ones(
    dtype: torch.dtype, page_size: int, share: int, head_dim: int, window: int, sink: float | None
) -> None:
    """300 tokens after a context of 4,700, in tiles of many, few and one; and some of them
    decoded."""
    num_keys, context = 5000, 4700
    plan = rows_of([context], [num_keys - context], page_size, tile=48, window=window)
    pages = torch.full(
        (plan.tables.numel() + 1, 2, 1, page_size, head_dim), float("nan"), dtype=dtype
    )
    cached = random_tensor(2, 1, num_keys, head_dim, dtype=dtype, seed=3)
    filled(pages, plan.tables[0], cached)
    queries, scale = (
        random_tensor(num_keys - context, share, head_dim, dtype=dtype, seed=4),
        head_dim**-0.5,
    )
    sinks = None if sink is None else torch.full((share,), sink / scale)
    out = attend_in_place(pages, queries, plan, scale, Team(), sinks)
    expected = truth(queries, cached, context, scale, window, sinks)
    tolerance = 4e-6 if dtype is torch.float32 else 4e-3
    assert (out.double() - expected).norm() / expected.norm() < tolerance
    beside_keys = torch.cat([queries, torch.full_like(queries, float("nan"))], 1)[:, :share]
    assert torch.equal(attend_in_place(pages, beside_keys, plan, scale, Team(), sinks), out)
    for tile in (13, 1):
        again = rows_of([context], [num_keys - context], page_size, tile=tile, window=window)
        assert torch.equal(attend_in_place(pages, queries, again, scale, Team(), sinks), out)
    for token in (0, 1, 63, 64, 299):
        alone = replace(
            rows_of([context + token], [1], page_size, window=window), tables=plan.tables
        )
        one = queries[token : token + 1]
        assert torch.equal(attend_in_place(pages, one, alone, scale, Team(), sinks)[0], out[token])


@pytest.mark.parametrize("share", [2, 20])
def test_keys_out_of_order_give_the_bits_of_the_same_keys_in_order(
    dtype: torch.dtype, share: int
) -> None:
    """16 keys of a path on one page, of which only the first and the last are at their place in
    order."""
    num_keys, offsets = 80, [0, *range(14, 0, -1), 15]
    in_order = rows_of([num_keys - 1], [1], 64)
    pages = torch.full((3, 2, 1, 64, 64), float("nan"), dtype=dtype)
    filled(pages, in_order.tables[0], random_tensor(2, 1, num_keys, 64, dtype=dtype, seed=1))
    queries, mixed, second = (
        random_tensor(1, share, 64, dtype=dtype, seed=2),
        pages.clone(),
        int(in_order.tables[0, 1]),
    )
    mixed[second][:, :, offsets] = pages[second][:, :, :16]
    path = RowsInPlace(
        in_order.tables,
        in_order.tiles,
        in_order.positions,
        torch.tensor([64], dtype=torch.int32),
        torch.tensor([offsets]) + second * 64,
        longest_tile=1,
    )
    expected = attend_in_place(pages, queries, in_order, 0.2, Team())
    assert torch.equal(attend_in_place(mixed, queries, path, 0.2, Team()), expected)


def through_paths(plan: RowsInPlace, contexts: list[int], page_size: int) -> RowsInPlace:
    """Return the same plan with new keys named by paths, as those of trees are."""
    paths = torch.zeros(len(plan.positions), plan.longest_tile, dtype=torch.long)
    for row, first, count in plan.tiles.tolist():
        keys = torch.arange(contexts[row], contexts[row] + count)
        slots = plan.tables[row, keys // page_size].long() * page_size + keys % page_size
        for token in range(count):
            paths[first + token, : token + 1] = slots[: token + 1]
    return replace(plan, num_in_order=torch.tensor(contexts, dtype=torch.int32), paths=paths)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    share=st.sampled_from([1, 2, 3, 4, 8]),
    head_dim=st.sampled_from([32, 64, 80, 96, 128, 256]),
    page_size=st.sampled_from([1, 16, 64, 100, 256]),
    num_kv_heads=st.sampled_from([1, 3, 4, 8]),
    count=st.integers(1, 4),
    contexts=st.lists(st.integers(0, 200), min_size=1, max_size=3),
    window=st.sampled_from([NO_WINDOW, None, 0, 7, 63, 64, 100]),
    num_threads=st.sampled_from([1, 2]),
    has_sinks=st.booleans(),
)
def test_few_rows_have_the_bits_of_packed_keys(
    monkeypatch: pytest.MonkeyPatch,
    share: int,
    head_dim: int,
    page_size: int,
    num_kv_heads: int,
    count: int,
    contexts: list[int],
    window: int | None,
    num_threads: int,
    *,
    has_sinks: bool,
) -> None:
    """No window marks keys by paths."""
    plan = rows_of(
        contexts, [count] * len(contexts), page_size, window=NO_WINDOW if window is None else window
    )
    if window is None:
        plan = through_paths(plan, contexts, page_size)
    pages = torch.full(
        (plan.tables.numel() + 1, 2, num_kv_heads, page_size, head_dim),
        float("nan"),
        dtype=torch.bfloat16,
    )
    for row, context in enumerate(contexts):
        cached = random_tensor(
            2, num_kv_heads, context + count, head_dim, dtype=torch.bfloat16, seed=1 + row
        )
        filled(pages, plan.tables[row], cached, max(0, context - plan.window))
    queries = random_tensor(
        len(plan.positions), num_kv_heads * share, head_dim, dtype=torch.bfloat16, seed=0
    )
    with monkeypatch.context() as patch:
        patch.setattr(
            paged_attention, "heads_of_item", lambda *sizes: heads_of_item(*sizes[:4], num_threads)
        )
        sinks = torch.linspace(-9, 9, num_kv_heads * share) if has_sinks else None
        few = attend_in_place(pages, queries, plan, 0.2, Team(), sinks)
        patch.setattr(paged_attention, "most_rows", lambda dtype, head_dim, *, tiled: 0)
        packed = attend_in_place(pages, queries, plan, 0.2, Team(), sinks)
    assert not few.isnan().any()
    assert torch.equal(few, packed)


def test_infinite_values_of_few_rows_equal_those_of_packed_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An odd number of keys, of which the last has an infinite value: it counts once."""
    plan = rows_of([36], [1], 64)
    pages = random_tensor(2, 2, 2, 64, 64, dtype=torch.bfloat16, seed=1)
    pages[1, 1, :, 36, ::2] = float("inf")
    queries = random_tensor(1, 4, 64, dtype=torch.bfloat16, seed=2)
    few = attend_in_place(pages, queries, plan, 0.2, Team())
    monkeypatch.setattr(paged_attention, "most_rows", lambda dtype, head_dim, *, tiled: 0)
    assert few.isinf().any()
    assert torch.equal(few, attend_in_place(pages, queries, plan, 0.2, Team()))


@pytest.mark.parametrize(
    ("num_tiles", "num_kv_heads", "tile_rows", "most", "num_threads", "heads"),
    [
        (1, 8, 2, 32, 1, 8),
        (1, 8, 2, 32, 2, 2),
        (1, 8, 2, 32, 4, 1),
        (1, 8, 2, 32, 16, 1),
        (2, 8, 2, 32, 2, 4),
        (8, 8, 2, 32, 4, 8),
        (8, 8, 8, 32, 1, 4),
        (8, 8, 8, 16, 1, 2),
        (8, 8, 16, 16, 1, 1),
        (1, 6, 8, 32, 1, 3),
        (3, 1, 8, 32, 2, 1),
        (0, 8, 0, 32, 2, 1),
    ],
)
def test_items_of_few_rows_leave_work_for_all_threads(
    num_tiles: int, num_kv_heads: int, tile_rows: int, most: int, num_threads: int, heads: int
) -> None:
    assert heads_of_item(num_tiles, num_kv_heads, tile_rows, most, num_threads) == heads


def test_few_rows_need_pair_products_or_a_matrix_unit() -> None:
    assert most_rows(torch.bfloat16, 64, tiled=False) == (8 if has_pair_products() else 0)
    assert most_rows(torch.bfloat16, 64, tiled=True) == 16
    assert most_rows(torch.bfloat16, 80, tiled=True) == 0
    assert most_rows(torch.float32, 64, tiled=False) == 0


def test_keys_after_a_tokens_own_change_no_bit_of_it(dtype: torch.dtype) -> None:
    """A token in a tile with later ones, whose values are as large as the type allows."""
    plan = rows_of([20], [60], 16, tile=60)
    pages = random_tensor(plan.tables.numel() + 1, 2, 1, 16, 32, dtype=dtype, seed=1)
    queries = random_tensor(60, 2, 32, dtype=dtype, seed=2)
    out = attend_in_place(pages, queries, plan, 0.2, Team())
    for position in range(50, 80):
        pages[plan.tables[0, position // 16], :, :, position % 16] = torch.finfo(dtype).max / 1024
    assert torch.equal(attend_in_place(pages, queries, plan, 0.2, Team())[:30], out[:30])


def test_an_uncomputed_output_is_an_error() -> None:
    pages, queries = torch.zeros(3, 2, 2, 16, 8), torch.zeros(2, 2, 8)
    with pytest.raises(InternalError, match="a kernel ended after 0 of 4 parts"):
        attend_in_place(pages, queries, rows_of([3, 5], [1, 1], 16), 1.0, Idle())


def test_concurrent_attention_threads_share_no_memory() -> None:
    """As the stages of several pools in one process do. One heap for all threads, so that what one
    frees too early is another's at once."""
    child = subprocess.run(
        [sys.executable, "-c", AT_THE_SAME_TIME],
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},
        timeout=200,
        capture_output=True,
        text=True,
    )
    assert (child.returncode, child.stdout) == (0, "the same bits\n"), child.stderr
