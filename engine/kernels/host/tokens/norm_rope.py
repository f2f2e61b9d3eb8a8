"""Root-mean-square norms and rotary embedding on the host.

Each is one pass over the tokens. torch needs seven passes for a norm, four for a rotation, and
eight for the table of a rotation. A norm's result depends on its row alone. A rotated
element depends on its pair and its angle alone.
"""

from functools import cache

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from engine.kernels.host.codegen.compiled import (
    DONE,
    NEXT,
    STORED_AS,
    STRICT,
    STRICT_PART,
    Team,
    bits_of,
    compile_kernel,
    count_up,
    launch_integers,
    number_of,
    pointer_to,
    record,
    rounded,
)
from engine.kernels.host.codegen.functions import cos_and_sin
from engine.kernels.host.codegen.row_vectors import (
    add_row,
    norm_row,
    norm_row_rounding_first,
    turn_row,
)
from engine.kernels.host.codegen.strided_loops import size_of
from engine.kernels.host.tokens.row_ops import rows_for_product

_NORM = record(
    "num_tokens",
    "num_heads",
    "width",
    "stride",
    "num_weights",
    "x",
    "weight",
    "out",
    "out_stride",
    "eps_bits",
    "other_stride",
    "other",
    "sums",
    "half",
    "cos",
    "sin",
)
_ROTATION = record("num_tokens", "num_heads", "width", "stride", "half", "x", "cos", "sin", "out")
_TABLES = record("num_tokens", "half", "positions", "frequencies", "amplitude_bits", "cos", "sin")
_ITEM_TOKENS = 16


def rms_norm(x: Tensor, weight: Tensor, eps: float, team: Team, *, rounds_first: bool) -> Tensor:
    """Normalize x [T, heads, D] or [T, D], dense within a token.

    weight is [D] or [heads, D], dense. Each is bf16 or fp32. With `rounds_first` the unit row is
    also rounded to x's dtype before the multiplication. The result is a new tensor in x's shape and
    dtype, dense within a token.
    """
    out = (
        torch.empty(x.shape, dtype=x.dtype)
        if x.dim() == 3
        else rows_for_product(x.shape[0], x.shape[1], x.dtype)
    )
    _launch_norm(x, weight, eps, team, out, rounds_first=rounds_first)
    return out


def norm_and_rotate(
    x: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    team: Team,
    *,
    rounds_first: bool,
) -> Tensor:
    """Compute `rotate_halves` of `rms_norm` of x [T, heads, D] in one pass, with the same bits."""
    out = torch.empty(x.shape, dtype=x.dtype)
    _launch_norm(
        x,
        weight,
        eps,
        team,
        out,
        turned=(cos.shape[-1], cos.data_ptr(), sin.data_ptr()),
        rounds_first=rounds_first,
    )
    return out


def add_and_norm(
    x: Tensor, other: Tensor, weight: Tensor, eps: float, team: Team, *, rounds_first: bool
) -> tuple[Tensor, Tensor]:
    """Return x + other, both [T, D] of one dtype, rounded once, and its `rms_norm`.

    The results are new tensors like x.
    """
    sums = torch.empty(x.shape, dtype=x.dtype)
    out = rows_for_product(x.shape[0], x.shape[1], x.dtype)
    _launch_norm(
        x,
        weight,
        eps,
        team,
        out,
        (other.stride(0), other.data_ptr(), sums.data_ptr()),
        rounds_first=rounds_first,
    )
    return sums, out


def _launch_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    team: Team,
    out: Tensor,
    added: tuple[int, int, int] = (0, 0, 0),
    turned: tuple[int, int, int] = (0, 0, 0),
    *,
    rounds_first: bool,
) -> None:
    """Launch the norm.

    `added` is the other's stride and address and the sums' address. `turned` is the number of pairs
    and the addresses of the table.
    """
    num_tokens = x.shape[0]
    width = x.shape[-1]
    launch_integers(
        norm_for(x.dtype, weight.dtype, rounds_first),
        -(-num_tokens // _ITEM_TOKENS),
        (
            num_tokens,
            x.shape[1] if x.dim() == 3 else 1,
            width,
            x.stride(0),
            weight.numel() // width,
            x.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            bits_of(eps),
            *added,
            *turned,
        ),
        team,
    )


@cache
def norm_for(dtype: torch.dtype, weight_dtype: torch.dtype, rounds_first: bool):  # noqa: FBT001
    stored = STORED_AS[dtype]
    weighed = STORED_AS[weight_dtype]

    # Functions have module-level names: a function in a closure would be part of numba's cache key.
    if rounds_first:

        def work(pointer):
            _norm_tokens(pointer, stored, weighed, norm_row_rounding_first)
    else:

        def work(pointer):
            _norm_tokens(pointer, stored, weighed, norm_row)

    name = f"rms_norm_{stored.__name__}_{weighed.__name__}_{'twice' if rounds_first else 'once'}"
    return compile_kernel(work, _NORM, name, numbers=STRICT)


@njit(**STRICT_PART)
def _norm_tokens(pointer, stored, weighed, norm):
    """Run one thread: process a few tokens at a time until no items are left."""
    a = carray(pointer, 1)[0]
    size = size_of(stored)
    weight_bytes = a.width * size_of(weighed)
    eps = number_of(a.eps_bits)
    while True:
        item = count_up(pointer, NEXT)
        if item >= a.num_items:
            return
        for token in range(item * _ITEM_TOKENS, min((item + 1) * _ITEM_TOKENS, a.num_tokens)):
            x = a.x + token * a.stride * size
            out = a.out + token * a.out_stride * size
            if a.sums:
                sums = a.sums + token * a.width * size
                add_row(x, a.other + token * a.other_stride * size, sums, a.width, stored)
                x = sums
            weight = 0
            angles = token * a.half * size
            for _ in range(a.num_heads):
                norm(x, a.weight + weight * weight_bytes, eps, out, a.width, stored, weighed)
                if a.half:
                    turn_row(out, a.cos + angles, a.sin + angles, out, a.half, a.width, stored)
                x = x + a.width * size
                out = out + a.width * size
                weight = weight + 1 if weight + 1 < a.num_weights else 0
        count_up(pointer, DONE)


def rotary_table(
    positions: Tensor, frequencies: Tensor, amplitude: float, dtype: torch.dtype, team: Team
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of positions times frequencies, times the amplitude, [T, 1, half] each.

    positions is [T] int64; frequencies is [half] fp32; the results are bf16 or fp32. An angle is
    rounded to fp32, as in torch.
    """
    shape = len(positions), 1, len(frequencies)
    cos = torch.empty(shape, dtype=dtype)
    sin = torch.empty(shape, dtype=dtype)
    positions = positions.contiguous()
    frequencies = frequencies.contiguous()
    launch_integers(
        tables_for(dtype),
        -(-len(positions) // _ITEM_TOKENS),
        (
            shape[0],
            shape[2],
            positions.data_ptr(),
            frequencies.data_ptr(),
            bits_of(amplitude),
            cos.data_ptr(),
            sin.data_ptr(),
        ),
        team,
    )
    return cos, sin


@cache
def tables_for(dtype: torch.dtype):
    stored = STORED_AS[dtype]

    def work(pointer):
        _fill_tables(pointer, stored)

    return compile_kernel(work, _TABLES, f"rotary_table_{stored.__name__}", numbers=STRICT)


@njit(**STRICT_PART)
def _fill_tables(pointer, stored):
    """Run one thread: process a few tokens at a time until no items are left."""
    a = carray(pointer, 1)[0]
    positions = carray(pointer_to(a.positions, np.int64), a.num_tokens)
    frequencies = carray(pointer_to(a.frequencies, np.float32), a.half)
    cos = carray(pointer_to(a.cos, stored), (a.num_tokens, a.half))
    sin = carray(pointer_to(a.sin, stored), (a.num_tokens, a.half))
    amplitude = number_of(a.amplitude_bits)
    while True:
        item = count_up(pointer, NEXT)
        if item >= a.num_items:
            return
        for token in range(item * _ITEM_TOKENS, min((item + 1) * _ITEM_TOKENS, a.num_tokens)):
            for place in range(a.half):
                along, across = cos_and_sin(np.float32(positions[token]) * frequencies[place])
                cos[token, place] = rounded(along * amplitude, stored)
                sin[token, place] = rounded(across * amplitude, stored)
        count_up(pointer, DONE)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor, team: Team) -> Tensor:
    """Rotate the pairs (i, i + half) of the first 2 * half channels and copy the rest.

    x is [T, heads, D] bf16 or fp32, dense within a token; cos and sin are [T, 1, half] in x's
    dtype, dense. The result is a new tensor in x's shape and dtype.
    """
    out = torch.empty(x.shape, dtype=x.dtype)
    if not len(x):
        return out
    launch_integers(
        rotation_for(x.dtype),
        -(-x.shape[0] // _ITEM_TOKENS),
        (
            *x.shape,
            x.stride(0),
            cos.shape[-1],
            x.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            out.data_ptr(),
        ),
        team,
    )
    return out


@cache
def rotation_for(dtype: torch.dtype):
    stored = STORED_AS[dtype]

    def work(pointer):
        _rotate_tokens(pointer, stored)

    return compile_kernel(work, _ROTATION, f"rotate_{stored.__name__}", numbers=STRICT)


@njit(**STRICT_PART)
def _rotate_tokens(pointer, stored):
    """Run one thread: process a few tokens at a time until no items are left."""
    a = carray(pointer, 1)[0]
    size = size_of(stored)
    while True:
        item = count_up(pointer, NEXT)
        if item >= a.num_items:
            return
        for token in range(item * _ITEM_TOKENS, min((item + 1) * _ITEM_TOKENS, a.num_tokens)):
            x = a.x + token * a.stride * size
            out = a.out + token * a.num_heads * a.width * size
            angles = token * a.half * size
            for _ in range(a.num_heads):
                turn_row(x, a.cos + angles, a.sin + angles, out, a.half, a.width, stored)
                x = x + a.width * size
                out = out + a.width * size
        count_up(pointer, DONE)
