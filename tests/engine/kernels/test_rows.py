"""Sums and copies of rows against torch's, bit by bit."""

import pytest
import torch

from engine.kernels.host.compiled import Team
from engine.kernels.host.rows import add_rows, copy_rows, write_tokens
from runtime.errors import InternalError

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@DTYPES
@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (3, 7, 5), (40, 1000)])
def test_sums(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, y = (torch.randn(shape).mul(100).to(dtype) for _ in range(2))
    if x.numel() > 100:
        x.view(-1)[:4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    assert torch.equal(add_rows(x, y, Team()).nan_to_num(-7.0), (x + y).nan_to_num(-7.0))


@DTYPES
@pytest.mark.parametrize("shape", [(1, 3, 8), (33, 5, 16)])
def test_copies_of_rows_that_lie_apart(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    whole = torch.randn(shape[0], shape[1] + 4, shape[2]).to(dtype)
    rows = whole[:, 2:2 + shape[1]]
    copy = copy_rows(rows, Team())
    assert copy.is_contiguous()
    assert torch.equal(copy, rows)


@DTYPES
@pytest.mark.parametrize(("num_tokens", "page_size"), [(1, 16), (35, 4)])
def test_tokens_go_to_their_pages_and_touch_nothing_else(dtype: torch.dtype, num_tokens: int, page_size: int) -> None:
    together = torch.randn(num_tokens, 7, 24).to(dtype)
    k, v = together[:, 1:4], together[:, 4:]
    pages = torch.full((40, 2, 3, page_size, 24), float("nan"), dtype=dtype)
    expected = pages.clone()
    slots = torch.randperm(40 * page_size)[:num_tokens]
    write_pages, write_offsets = slots // page_size, slots % page_size
    expected[write_pages, 0, :, write_offsets], expected[write_pages, 1, :, write_offsets] = k, v
    write_tokens(k, v, pages, write_pages, write_offsets, Team())
    assert torch.equal(pages.nan_to_num(-7.0), expected.nan_to_num(-7.0))


@pytest.mark.parametrize(("num_heads", "width", "num_places"), [(2, 24, 5), (3, 16, 5), (3, 24, 4)])
def test_shapes_that_do_not_belong_together_are_refused(num_heads: int, width: int, num_places: int) -> None:
    tokens, places = torch.zeros(5, num_heads, width), torch.zeros(num_places, dtype=torch.long)
    with pytest.raises(InternalError, match=r"for [45] places in pages of \(2, 3, 16, 24\)$"):
        write_tokens(tokens, tokens, torch.zeros(2, 2, 3, 16, 24), places, places, Team())
