"""Rotary embedding on the host in one pass, where torch makes four with strides. An element's bits depend on its pair
and its angle alone."""

from functools import cache

import torch
from numba import carray, njit
from torch import Tensor

from engine.kernels.host.compiled import (
    DONE,
    NEXT,
    PART,
    STORED_AS,
    Team,
    compile_kernel,
    count_up,
    launch_integers,
    pointer_to,
    record,
    rounded,
    wide,
)

_ARGUMENTS = record("num_tokens", "num_heads", "width", "stride", "half", "x", "cos", "sin", "out")
_ITEM_TOKENS = 16


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor, team: Team) -> Tensor:
    """Pairs (i, i + half) of the first 2 * half channels turned, the rest kept.

    x: [T, heads, D] bf16 or fp32, dense within a token; cos, sin: [T, 1, half] in x's type, dense. Returns a new tensor
    in x's shape and type.
    """
    out = torch.empty(x.shape, dtype=x.dtype)
    if not len(x):
        return out
    launch_integers(_compiled_for(x.dtype), (
        -(-x.shape[0] // _ITEM_TOKENS), *x.shape, x.stride(0), cos.shape[-1], x.data_ptr(), cos.data_ptr(),
        sin.data_ptr(), out.data_ptr()), team)
    return out


@cache
def _compiled_for(dtype: torch.dtype):
    stored = STORED_AS[dtype]

    def work(pointer):
        _take_tokens(pointer, stored)

    return compile_kernel(work, _ARGUMENTS, f"rotate_{stored.__name__}", __file__)


@njit(**PART)
def _take_tokens(pointer, stored):
    """One thread's part: a few tokens at a time, until none is left."""
    a = carray(pointer, 1)[0]
    x = carray(pointer_to(a.x, stored), (a.num_tokens - 1) * a.stride + a.num_heads * a.width)
    cos = carray(pointer_to(a.cos, stored), (a.num_tokens, a.half))
    sin = carray(pointer_to(a.sin, stored), (a.num_tokens, a.half))
    out = carray(pointer_to(a.out, stored), (a.num_tokens, a.num_heads, a.width))
    while True:
        item = count_up(pointer, NEXT)
        if item >= a.num_items:
            return
        for token in range(item * _ITEM_TOKENS, min((item + 1) * _ITEM_TOKENS, a.num_tokens)):
            for head in range(a.num_heads):
                first = token * a.stride + head * a.width
                _turn(x[first:first + a.width], cos[token], sin[token], out[token, head], stored)
        count_up(pointer, DONE)


@njit(**PART)
def _turn(x, cos, sin, out, stored):
    half = len(cos)
    for place in range(half):
        a, b = wide(x[place]), wide(x[half + place])
        out[place] = rounded(a * wide(cos[place]) - b * wide(sin[place]), stored)
        out[half + place] = rounded(b * wide(cos[place]) + a * wide(sin[place]), stored)
    for place in range(2 * half, len(x)):
        out[place] = x[place]
