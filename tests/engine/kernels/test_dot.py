"""The innermost loop of products, and functions of one number, by hand and in double precision."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numba import float32, int64, njit, void
from torch import Tensor

from engine.kernels.host.codegen import functions
from engine.kernels.host.codegen.dot import Form, dot_block
from engine.kernels.host.codegen.vectors import has_pair_products

Numbers = np.ndarray[Any, np.dtype[np.float32]]


def multiplied(
    x: Tensor,
    w: Tensor,
    form: Form,
    *,
    adds: bool = False,
    widened: bool | None = None,
    start: Tensor | None = None,
) -> Tensor:
    """Multiply x [rows, K] by w [blocks * 16, K], packed here in torch."""
    loop = dot_block(len(x), len(w) // 16, form, adds=adds, widened=widened)

    def call(x: int, x_row: int, w: int, w_block: int, y: int, y_row: int, steps: int) -> None:
        loop(x, x_row, w, w_block, y, y_row, steps)

    blocks = w.view(len(w) // 16, 16, -1)
    packed = (
        (blocks if form is Form.FP32 else blocks.view(*blocks.shape[:2], -1, 2))
        .transpose(1, 2)
        .contiguous()
    )
    y = torch.full((len(x), len(w) + 3), float("nan")) if start is None else start
    compiled = njit(void(*[int64] * 7))(call)
    compiled(
        x.data_ptr(),
        x.stride(0) * x.element_size(),
        packed.data_ptr(),
        packed[0].nbytes,
        y.data_ptr(),
        y.stride(0) * 4,
        packed.shape[1],
    )
    return y[:, : len(w)]


def in_order(x: Tensor, w: Tensor, start: Tensor, *, pairs: bool) -> Tensor:
    """Add terms one after the other, of a pair the second first.

    In double precision each product is exact, and one rounding to fp32 after each addition is a
    fused multiply-add's, except for double rounding.
    """
    order = [k ^ 1 if pairs else k for k in range(x.shape[1])]
    total = start.clone()
    for k in order:
        total = (total.double() + x[:, k, None].double() * w[None, :, k].double()).float()
    return total


@pytest.mark.parametrize("form", [Form.BF16, Form.MIXED, Form.FP32])
@pytest.mark.parametrize(
    ("rows", "blocks", "terms"), [(1, 1, 2), (5, 2, 34), (6, 4, 100), (3, 1, 0)]
)
def test_terms_are_added_in_order(form: Form, rows: int, blocks: int, terms: int) -> None:
    generator = torch.Generator().manual_seed(terms)
    x, w = (
        torch.randn(rows, terms, generator=generator),
        torch.randn(16 * blocks, terms, generator=generator),
    )
    x = x.bfloat16() if form is Form.BF16 else x
    w = w if form is Form.FP32 else w.bfloat16()
    start = torch.randn(rows, 16 * blocks, generator=generator)
    expected = in_order(x, w, torch.zeros(rows, 16 * blocks), pairs=form is not Form.FP32)
    assert torch.equal(multiplied(x, w, form), expected)
    assert torch.equal(multiplied(x, w, form, widened=True), expected)
    assert torch.equal(
        multiplied(x, w, form, adds=True, start=start.clone()),
        in_order(x, w, start, pairs=form is not Form.FP32),
    )


def test_pair_products_take_subnormal_numbers_for_zero() -> None:
    """The one difference between the two classes of arithmetic."""
    x, w = torch.full((1, 2), 2.0**-70).bfloat16(), torch.full((16, 2), 2.0**-70).bfloat16()
    assert (multiplied(x, w, Form.BF16, widened=True) == 2.0**-139).all()
    if has_pair_products():
        assert (multiplied(x, w, Form.BF16) == 0).all()


def all_of(function: Callable[[np.float32], np.float32], x: Numbers) -> Numbers:
    def call(x: Numbers, y: Numbers) -> None:
        for place in range(len(x)):
            y[place] = function(x[place])

    compiled, y = (
        njit(void(float32[::1], float32[::1]), error_model="numpy")(call),
        np.empty_like(x),
    )
    compiled(x, y)
    again = np.empty_like(y[5:70])
    compiled(x[5:70].copy(), again)
    assert np.array_equal(again, y[5:70], equal_nan=True)  # at any position
    return y


def test_exp() -> None:
    x = np.linspace(-110, 95, 200_003, dtype=np.float32)
    exact = np.exp(x.astype(np.float64))
    y, largest, smallest = all_of(functions.exp, x), float(np.finfo(np.float32).max), 2.0**-126
    normal = (exact < largest) & (exact > smallest)
    assert (np.abs(y[normal] - exact[normal]) <= 2.0**-22 * exact[normal]).all()
    assert np.isinf(y[exact > 1.0001 * largest]).all()
    assert (np.abs(y - exact)[exact <= smallest] <= 2.0**-148).all()


def test_special_numbers() -> None:
    x = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0], np.float32)
    np.testing.assert_allclose(
        all_of(functions.exp, x), [np.nan, np.inf, 0.0, 1.0, 1.0, np.e], rtol=2e-7
    )
    of_one = 1 / (1 + 1 / np.e)
    np.testing.assert_allclose(
        all_of(functions.sigmoid, x), [np.nan, 1.0, 0.0, 0.5, 0.5, of_one], rtol=2e-7
    )
    np.testing.assert_allclose(all_of(functions.silu, x[3:]), [0.0, 0.0, of_one], rtol=2e-7)


def test_silu_and_sigmoid() -> None:
    x = np.linspace(-80, 80, 100_001, dtype=np.float32)
    sigmoid = 1 / (1 + np.exp(-x.astype(np.float64)))
    np.testing.assert_allclose(all_of(functions.sigmoid, x), sigmoid, rtol=5e-7)
    np.testing.assert_allclose(all_of(functions.silu, x), x * sigmoid, rtol=5e-7)
