"""The host's attention over compressed keys, and its choice of keys: the definitions, and bits of
own keys alone."""

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.backends.selection import best_positions
from engine.kernels.host.attention.mla import attend_latent
from engine.kernels.host.attention.sparse_index import select_keys
from engine.kernels.host.codegen.compiled import Team
from engine.kernels.latent_rows import LatentRows

TEAM = Team()
TYPES = [torch.bfloat16, torch.float32]
NOTHING_LISTED = torch.empty(0, dtype=torch.int32)


@pytest.fixture(autouse=True)
def own_number_of_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def rows_of(contexts: list[int], counts: list[int], page_size: int) -> LatentRows:
    """Return rows on their own pages, in descending order without page 0; each token sees its row
    up to itself."""
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
    lasts = [
        context + token
        for context, count in zip(contexts, counts, strict=True)
        for token in range(count)
    ]
    return LatentRows(
        starts=torch.tensor([0, *counts]).cumsum(0),
        contexts=torch.tensor(contexts),
        tables=tables,
        token_rows=torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)),
        num_common=torch.tensor(lasts) + 1,
        listed=NOTHING_LISTED.expand(len(lasts), 0),
    )


def with_list(rows: LatentRows, num_common: Tensor, listed: Tensor) -> LatentRows:
    return LatentRows(rows.starts, rows.contexts, rows.tables, rows.token_rows, num_common, listed)


def filled(
    rows: LatentRows, counts: list[int], page_size: int, dim: int, dtype: torch.dtype
) -> tuple[Tensor, list[Tensor]]:
    """Return pages of NaN with the rows' keys in them, and the keys by row."""
    pages = torch.full((rows.tables.numel() + 1, page_size, dim), math.nan, dtype=dtype)
    keys = []
    for row, (table, context, count) in enumerate(
        zip(rows.tables.long(), rows.contexts.tolist(), counts, strict=True)
    ):
        own = torch.randn(context + count, dim, generator=torch.Generator().manual_seed(row)).to(
            dtype
        )
        for key in range(len(own)):
            pages[table[key // page_size], key % page_size] = own[key]
        keys.append(own)
    return pages, keys


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    dtype=st.sampled_from(TYPES),
    page_size=st.sampled_from([1, 16, 64]),
    num_heads=st.sampled_from([1, 4, 16, 20, 130]),
    dims=st.sampled_from([(24, 8), (3, 2), (64, 17), (512, 64)]),
    threads=st.integers(1, 4),
    rows=st.lists(st.tuples(st.integers(0, 150), st.integers(0, 5)), min_size=1, max_size=3),
)
def test_attention_is_the_definition(
    dtype: torch.dtype,
    page_size: int,
    num_heads: int,
    dims: tuple[int, int],
    threads: int,
    rows: list[tuple[int, int]],
) -> None:
    torch.set_num_threads(threads)
    contexts, counts = [context for context, _ in rows], [count for _, count in rows]
    plan, (latent, rope) = rows_of(contexts, counts, page_size), dims
    pages, keys = filled(plan, counts, page_size, latent + rope, dtype)
    q = torch.randn(
        sum(counts), num_heads, latent + rope, generator=torch.Generator().manual_seed(9)
    ).to(dtype)
    out = attend_latent(pages, q, plan, latent_dim=latent, scale=0.2, team=TEAM)
    spacing = torch.finfo(dtype).eps
    for token in range(sum(counts)):
        seen = keys[int(plan.token_rows[token])][: int(plan.num_common[token])].double()
        expected = (q[token].double() @ seen.T * 0.2).softmax(-1) @ seen[:, :latent]
        torch.testing.assert_close(
            out[token].double(), expected, rtol=max(2 * spacing, 1e-4), atol=1e-5
        )


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_token_has_its_bits_alone_in_company_and_from_a_list(
    dtype: torch.dtype, threads: int
) -> None:
    """Among so many tokens that items take more heads at once; from lists with gaps, as trees and
    choices give them."""
    contexts, counts = [130, 0, 40], [70, 100, 31]
    plan = rows_of(contexts, counts, 16)
    pages, _ = filled(plan, counts, 16, 40, dtype)
    q = torch.randn(201, 24, 40, generator=torch.Generator().manual_seed(2)).to(dtype)
    torch.set_num_threads(threads)
    out = attend_latent(pages, q, plan, latent_dim=24, scale=0.3, team=TEAM)
    longest = int(plan.num_common.max())
    listed = torch.arange(longest + 7, dtype=torch.int32).expand(201, -1).clone()
    listed[listed >= plan.num_common[:, None]] = -1
    zeros = torch.zeros_like(plan.num_common)
    gaps = torch.stack([listed, torch.full_like(listed, -1)], 2).flatten(1).contiguous()
    for given_list in (listed, gaps):
        found = attend_latent(
            pages, q, with_list(plan, zeros, given_list), latent_dim=24, scale=0.3, team=TEAM
        )
        assert torch.equal(out, found)
    for token in (0, 69, 70, 170, 200):
        row = int(plan.token_rows[token])
        alone = LatentRows(
            torch.tensor([0, 1]),
            torch.tensor([0]),
            plan.tables[row : row + 1],
            torch.tensor([0]),
            plan.num_common[token : token + 1],
            NOTHING_LISTED.expand(1, 0),
        )
        single = attend_latent(
            pages, q[token : token + 1], alone, latent_dim=24, scale=0.3, team=TEAM
        )
        assert torch.equal(out[token], single[0])


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    dtype=st.sampled_from(TYPES),
    page_size=st.sampled_from([1, 16, 64]),
    num_heads=st.integers(1, 5),
    threads=st.integers(1, 4),
    dim=st.sampled_from([3, 16, 128]),
    count=st.sampled_from([1, 8, 100]),
    has_ties=st.booleans(),
    rows=st.lists(st.tuples(st.integers(0, 150), st.integers(0, 70)), min_size=1, max_size=3),
)
def test_the_best_keys_are_chosen(
    dtype: torch.dtype,
    page_size: int,
    num_heads: int,
    threads: int,
    dim: int,
    count: int,
    has_ties: bool,  # noqa: FBT001
    rows: list[tuple[int, int]],
) -> None:
    """Whole numbers have one sum in every order; with few of them many scores are equal, among them
    0 and -0."""
    contexts, counts = [context for context, _ in rows], [number for _, number in rows]
    if not sum(counts):
        return
    torch.set_num_threads(threads)
    plan = rows_of(contexts, counts, page_size)
    pages, keys = filled(plan, counts, page_size, dim, dtype)
    generator, bound = torch.Generator().manual_seed(3), 1 if has_ties else 30
    q = torch.randint(-bound, bound + 1, (sum(counts), num_heads, dim), generator=generator).float()
    weights = torch.randint(-2, 3, (sum(counts), num_heads), generator=generator).float()
    pages, keys = pages.round(), [key.round() for key in keys]
    chosen = select_keys(pages, q, weights, plan, count=count, team=TEAM)
    for token in range(sum(counts)):
        seen = keys[int(plan.token_rows[token])][: int(plan.num_common[token])].float()
        products = torch.relu(q[token] @ seen.T * dim**-0.5)
        scores = torch.zeros(len(seen))
        for head in range(num_heads):
            scores += weights[token, head] * products[head]
        hidden = torch.zeros(1, len(seen), dtype=torch.bool)
        best = best_positions(scores[None], hidden, min(count, len(seen)))[0]
        assert chosen[token].tolist() == best.tolist() + [-1] * (count - len(best))


@pytest.mark.parametrize("threads", [1, 3])
def test_a_choice_is_the_same_alone_and_in_company_and_along_a_path(threads: int) -> None:
    torch.set_num_threads(threads)
    contexts, counts = [300, 90], [9, 70]
    plan = rows_of(contexts, counts, 16)
    pages, _ = filled(plan, counts, 16, 100, torch.bfloat16)
    generator = torch.Generator().manual_seed(4)
    q, weights = (
        torch.randn(79, 7, 100, generator=generator),
        torch.randn(79, 7, generator=generator),
    )
    together = select_keys(pages, q, weights, plan, count=50, team=TEAM)
    for token in (0, 8, 9, 78):
        row, seen = int(plan.token_rows[token]), int(plan.num_common[token])
        alone = LatentRows(
            torch.tensor([0, 1]),
            torch.tensor([seen - 1]),
            plan.tables[row : row + 1],
            torch.tensor([0]),
            torch.tensor([seen]),
            NOTHING_LISTED.expand(1, 0),
        )
        single = select_keys(
            pages, q[token : token + 1], weights[token : token + 1], alone, count=50, team=TEAM
        )
        assert torch.equal(together[token], single[0])
    # The last token of row 0 does not see the two before it; what it does not see may be anything.
    listed = torch.full((79, 2), -1, dtype=torch.int32)
    listed[8, :2] = torch.tensor([306, 308])
    num_common = plan.num_common.clone()
    num_common[8] = 300
    found = select_keys(
        pages, q, weights, with_list(plan, num_common, listed), count=50, team=TEAM
    )[8].tolist()
    assert not {301, 302, 303, 304, 305, 307} & set(found)
    assert set(found) >= {key for key in together[8].tolist() if key < 300 or key in (306, 308)}
