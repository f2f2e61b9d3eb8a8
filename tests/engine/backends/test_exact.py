"""A token's output has the same bits in any batch and on any path: prefilled in chunks of any
length, decoded, or verified in a chain or a tree."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.backends.cpu.attention import CpuAttention
from engine.contracts.attention import AttentionGeometry
from engine.core.batch import ForwardMode
from runtime.errors import InternalError
from tests.support.kernels.attention import LAYER, Prompt, dense, feed, make_prompt, poisoned_pool
from tests.support.kernels.batches import Row, make_batch

NUM_TOKENS = 150
QUICK = settings(max_examples=25, deadline=None, derandomize=True)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
page_sizes = st.sampled_from([4, 16, 64])
heads = st.sampled_from([(4, 4), (4, 2), (8, 2), (3, 1)])


def geometry_of(num_heads: tuple[int, int], page_size: int) -> AttentionGeometry:
    return AttentionGeometry(*num_heads, head_dim=16, page_size=page_size, scale=0.25)


def backend_of(
    geometry: AttentionGeometry, dtype: torch.dtype, *, num_pages: int = 400
) -> CpuAttention:
    pool = poisoned_pool(num_pages, geometry, dtype)
    return CpuAttention(kv_pools={LAYER: pool}, geometry=geometry)


def prompt_of(
    geometry: AttentionGeometry,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    first_page: int = 1,
    num_tokens: int = NUM_TOKENS,
) -> Prompt:
    num_pages = -(-num_tokens // geometry.page_size)
    pages = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)) + first_page
    return make_prompt(num_tokens, geometry, pages=pages.tolist(), seed=seed, dtype=dtype)


def whole(
    geometry: AttentionGeometry, dtype: torch.dtype, *, seed: int = 0, num_tokens: int = NUM_TOKENS
) -> Tensor:
    prompt = prompt_of(geometry, dtype, seed=seed, num_tokens=num_tokens)
    return feed(backend_of(geometry, dtype), ForwardMode.PREFILL, (prompt, num_tokens))


def stepped(
    geometry: AttentionGeometry,
    dtype: torch.dtype,
    prefill: int,
    steps: int,
    *,
    num_tokens: int = NUM_TOKENS,
) -> Tensor:
    """Run the first tokens of the prompt at once and some one by one, without other rows."""
    prompt, backend = prompt_of(geometry, dtype, num_tokens=num_tokens), backend_of(geometry, dtype)
    feed(backend, ForwardMode.PREFILL, (prompt, prefill))
    for _ in range(steps):
        feed(backend, ForwardMode.DECODE, (prompt, 1))
    return prompt.output()


@QUICK
@given(
    dtype=dtypes,
    page_size=page_sizes,
    num_heads=heads,
    cuts=st.sets(st.integers(1, NUM_TOKENS - 1), max_size=6),
)
def test_any_chunking(
    dtype: torch.dtype, page_size: int, num_heads: tuple[int, int], cuts: set[int]
) -> None:
    geometry = geometry_of(num_heads, page_size)
    prompt, backend = prompt_of(geometry, dtype), backend_of(geometry, dtype)
    edges = [0, *sorted(cuts), NUM_TOKENS]
    for start, end in itertools.pairwise(edges):
        feed(backend, ForwardMode.PREFILL, (prompt, end - start))
    assert torch.equal(prompt.output(), whole(geometry, dtype))


@QUICK
@given(
    dtype=dtypes,
    page_size=page_sizes,
    num_heads=heads,
    prefill=st.integers(1, NUM_TOKENS - 1),
    others=st.lists(st.integers(1, 140), max_size=5),
    place=st.integers(0, 5),
    table_width=st.integers(0, 60),
)
def test_any_company(
    dtype: torch.dtype,
    page_size: int,
    num_heads: tuple[int, int],
    prefill: int,
    others: list[int],
    place: int,
    table_width: int,
) -> None:
    """Prefill and decode with other rows, at any place in the batch, under a page table of any
    width."""
    geometry = geometry_of(num_heads, page_size)
    backend = backend_of(geometry, dtype)
    prompt = prompt_of(geometry, dtype)
    steps = NUM_TOKENS - prefill
    company = [
        prompt_of(geometry, dtype, seed=9 + i, first_page=50 + 60 * i, num_tokens=n + steps)
        for i, n in enumerate(others)
    ]
    parts = list(zip(company, others, strict=True))
    parts.insert(place, (prompt, prefill))
    feed(backend, ForwardMode.PREFILL, *parts, table_width=table_width)
    for _ in range(min(steps, 4)):
        feed(
            backend,
            ForwardMode.DECODE,
            *((other, 1) for other, _ in parts),
            table_width=table_width,
        )
    output = prompt.output()
    assert torch.equal(output, stepped(geometry, dtype, prefill, min(steps, 4)))
    assert torch.equal(output, whole(geometry, dtype)[: len(output)])


@QUICK
@given(
    dtype=dtypes,
    page_size=page_sizes,
    num_heads=heads,
    context=st.integers(1, 140),
    length=st.integers(1, 9),
)
def test_a_chain_is_verified_with_the_bits_of_plain_decoding(
    dtype: torch.dtype, page_size: int, num_heads: tuple[int, int], context: int, length: int
) -> None:
    geometry = geometry_of(num_heads, page_size)
    prompt, backend = prompt_of(geometry, dtype), backend_of(geometry, dtype)
    other = prompt_of(geometry, dtype, seed=9, first_page=200)
    feed(backend, ForwardMode.PREFILL, (prompt, context), (other, 3))
    feed(backend, ForwardMode.VERIFY, (prompt, length), (other, 2))
    assert torch.equal(prompt.output(), stepped(geometry, dtype, context, length))
    assert torch.equal(prompt.output(), whole(geometry, dtype)[: context + length])


@QUICK
@given(
    dtype=dtypes,
    page_size=page_sizes,
    num_heads=heads,
    context=st.integers(0, 140),
    parents=st.lists(st.integers(-1, 6), min_size=1, max_size=8),
)
def test_a_node_of_a_tree_is_verified_with_the_bits_of_its_path_read(
    dtype: torch.dtype, page_size: int, num_heads: tuple[int, int], context: int, parents: list[int]
) -> None:
    """Every node, together with another tree: its path gives the same bits as a prompt of those
    tokens."""
    geometry = geometry_of(num_heads, page_size)
    parents = [min(parent, node - 1) for node, parent in enumerate(parents)]
    visible = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            visible[node] |= visible[parent]
    prompt, backend = prompt_of(geometry, dtype), backend_of(geometry, dtype)
    other = prompt_of(geometry, dtype, seed=9, first_page=200)
    feed(backend, ForwardMode.PREFILL, *([(prompt, context)] if context else []), (other, 70))
    feed(
        backend,
        ForwardMode.VERIFY,
        (other, 3),
        (prompt, len(parents)),
        trees=[(-1,) * 3, tuple(parents)],
    )
    for node, seen in enumerate(visible):
        path = [*range(context), *(context + seen.nonzero().flatten()).tolist()]
        alone = prompt_of(geometry, dtype)
        alone.q, alone.k, alone.v = (x[path] for x in (alone.q, alone.k, alone.v))
        expected = feed(backend_of(geometry, dtype), ForwardMode.PREFILL, (alone, len(path)))[-1]
        assert torch.equal(prompt.out[-1][node], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 3, 64, 150, 257])
def test_page_size_does_not_show(dtype: torch.dtype, num_tokens: int) -> None:
    sizes = (1, 16, 24, 64, 128)
    outputs = [whole(geometry_of((8, 2), size), dtype, num_tokens=num_tokens + 3) for size in sizes]
    outputs += [
        stepped(geometry_of((8, 2), size), dtype, num_tokens, 3, num_tokens=num_tokens + 3)
        for size in sizes
    ]
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.fixture
def threads() -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield 2
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_heads", [(1, 1), (5, 1), (4, 2)])
def test_threads_do_not_show(threads: int, dtype: torch.dtype, num_heads: tuple[int, int]) -> None:
    geometry = geometry_of(num_heads, 16)
    two, drawn = whole(geometry, dtype), stepped(geometry, dtype, 100, 50)
    chunks, backend = prompt_of(geometry, dtype), backend_of(geometry, dtype)
    for count in (1, 5, 100, 9, 1, 34):
        feed(backend, ForwardMode.PREFILL, (chunks, count))
    torch.set_num_threads(1)
    assert torch.equal(two, whole(geometry, dtype))
    assert torch.equal(two, chunks.output())
    assert torch.equal(two, drawn)


@pytest.mark.parametrize("mode", [ForwardMode.PREFILL, ForwardMode.VERIFY])
def test_bf16_is_as_near_to_the_truth_as_bf16_allows(mode: ForwardMode) -> None:
    geometry = AttentionGeometry(8, 2, head_dim=64, page_size=16, scale=0.125)
    prompt = make_prompt(300, geometry, pages=range(1, 20), seed=3, dtype=torch.bfloat16)
    out = feed(backend_of(geometry, torch.bfloat16), mode, (prompt, 300)).double()
    truth = dense(prompt, geometry)
    assert (out - truth).norm() / truth.norm() < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_scores_do_not_overflow(dtype: torch.dtype) -> None:
    geometry = geometry_of((4, 2), 16)
    prompt = prompt_of(geometry, dtype)
    prompt.q *= 1000
    for mode in (ForwardMode.PREFILL, ForwardMode.VERIFY):
        prompt.fed = 0
        assert feed(backend_of(geometry, dtype), mode, (prompt, NUM_TOKENS)).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_very_unlikely_keys_are_weighed_against_each_other_only(dtype: torch.dtype) -> None:
    """All scores far below zero, in a row shorter than its company: nothing but the row's own
    maximum may count."""
    geometry = geometry_of((4, 2), 16)
    short, long = (
        prompt_of(geometry, dtype, seed=n, first_page=n, num_tokens=n) for n in (20, 140)
    )
    short.k.fill_(8.0)
    short.q.fill_(-8.0)
    backend = backend_of(geometry, dtype)
    feed(backend, ForwardMode.PREFILL, (short, 19), (long, 139))
    feed(backend, ForwardMode.DECODE, (short, 1), (long, 1))
    torch.testing.assert_close(
        short.output().double(), dense(short, geometry), rtol=0.02, atol=0.02
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_rows_batched_with_longer_ones_keep_their_bits(dtype: torch.dtype) -> None:
    """Sums over blocks must not be regrouped when a longer row widens the batch."""
    geometry = geometry_of((2, 1), 64)
    outputs = []
    for company in (1, 2900):
        backend = backend_of(geometry, dtype)
        prompt = prompt_of(geometry, dtype, num_tokens=1500)
        other = prompt_of(geometry, dtype, seed=1, first_page=100, num_tokens=company + 8)
        feed(backend, ForwardMode.PREFILL, (prompt, 1492), (other, company))
        for _ in range(8):
            feed(backend, ForwardMode.DECODE, (prompt, 1), (other, 1))
        outputs.append(prompt.output())
    assert torch.equal(*outputs)
    assert torch.equal(outputs[0], stepped(geometry, dtype, 1492, 8, num_tokens=1500))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 128])
def test_chunks_across_the_edge_of_a_block(dtype: torch.dtype, head_dim: int) -> None:
    geometry = AttentionGeometry(2, 1, head_dim=head_dim, page_size=64, scale=0.25)
    for edge in (128, 1024):
        prompt, backend = (
            prompt_of(geometry, dtype, num_tokens=edge + 70),
            backend_of(geometry, dtype),
        )
        feed(backend, ForwardMode.PREFILL, (prompt, edge - 50))
        feed(backend, ForwardMode.PREFILL, (prompt, 120))
        assert torch.equal(prompt.output(), whole(geometry, dtype, num_tokens=edge + 70))


@QUICK
@given(page_size=page_sizes, dtype=dtypes, context=st.integers(0, 70), count=st.integers(1, 70))
def test_stale_memory_does_not_change_results(
    page_size: int, dtype: torch.dtype, context: int, count: int
) -> None:
    """Free pages, the null page and unwritten tails hold NaN, infinities or huge numbers: same
    bits."""
    geometry = geometry_of((4, 2), page_size)
    outputs = []
    for junk in (float("nan"), float("inf"), 1e9, 0.0):
        pool = torch.full_like(poisoned_pool(60, geometry, dtype), junk)
        backend = CpuAttention(kv_pools={LAYER: pool}, geometry=geometry)
        prompt = prompt_of(geometry, dtype)
        other = prompt_of(geometry, dtype, seed=5, first_page=40, num_tokens=3)
        if context:
            feed(backend, ForwardMode.PREFILL, (prompt, context))
        feed(backend, ForwardMode.PREFILL, (other, 1), (prompt, count), table_width=45)
        feed(backend, ForwardMode.DECODE, (other, 1), (prompt, 1), table_width=45)
        outputs.append(torch.cat([prompt.output(), other.output()]))
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_heads_that_cannot_be_shared_evenly_are_refused() -> None:
    with pytest.raises(InternalError, match="5 heads"):
        backend_of(geometry_of((5, 2), 16), torch.float32)


@pytest.mark.parametrize("page", [64, -1])
def test_pages_outside_the_pool_are_refused_before_they_are_read(page: int) -> None:
    backend = backend_of(geometry_of((4, 2), 16), torch.float32, num_pages=64)
    with pytest.raises(InternalError, match="the pool has 64 pages"):
        backend.plan(make_batch(ForwardMode.DECODE, [Row(1, 3, (1,)), Row(1, 3, (page,))]))


def test_a_scale_that_would_turn_scores_round_is_refused() -> None:
    geometry = AttentionGeometry(4, 2, head_dim=16, page_size=16, scale=0.0)
    with pytest.raises(InternalError, match="more than 0"):
        backend_of(geometry, torch.float32)


def test_pages_of_another_shape_are_refused() -> None:
    pool = poisoned_pool(4, geometry_of((4, 4), 16))
    with pytest.raises(InternalError, match="layer 3"):
        CpuAttention(kv_pools={LAYER: pool}, geometry=geometry_of((4, 2), 16))
