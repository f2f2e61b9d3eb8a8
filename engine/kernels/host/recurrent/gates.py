"""Operations between the products of a recurrent or gated layer.

They are the decay and write strength of the delta rule, the gated norm of its output, and the gate
of attention's output. Each is one pass over the tokens in place. Every element has the same
operations in the same order, whatever its neighbors.
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
    wide,
)
from engine.kernels.host.codegen.functions import fma, sigmoid, softplus
from engine.kernels.host.codegen.strided_loops import floats, size_of

_GATES = record(
    "num_tokens",
    "num_heads",
    "width",
    "step",
    "step_stride",
    "write",
    "write_stride",
    "rates",
    "offsets",
    "decay",
    "strength",
)
_NORM = record(
    "num_tokens",
    "num_heads",
    "width",
    "x",
    "gate",
    "gate_stride",
    "weight",
    "out",
    "eps_bits",
    "is_silu",
)
_HEADS = record("num_tokens", "width", "x", "gate", "gate_stride", "out")
_ITEM_TOKENS = 4


def delta_gates(
    step: Tensor, write: Tensor, rates: Tensor, offsets: Tensor, team: Team
) -> tuple[Tensor, Tensor]:
    """Compute log decays rates * softplus(step + offsets) and write strengths sigmoid(write).

    step is [T, H * w] and write [T, H], each dense within a token, of one dtype, bf16 or fp32.
    rates is [H] and offsets [H * w], fp32, dense. The results are [T, H * w] and [T, H] fp32.
    """
    num_tokens, num_heads = write.shape
    decay = torch.empty(step.shape, dtype=torch.float32)
    strength = torch.empty(write.shape, dtype=torch.float32)
    launch_integers(
        gates_for(step.dtype),
        -(-num_tokens // _ITEM_TOKENS),
        (
            num_tokens,
            num_heads,
            step.shape[1] // num_heads,
            step.data_ptr(),
            step.stride(0) * step.itemsize,
            write.data_ptr(),
            write.stride(0) * write.itemsize,
            rates.data_ptr(),
            offsets.data_ptr(),
            decay.data_ptr(),
            strength.data_ptr(),
        ),
        team,
    )
    return decay, strength


@cache
def gates_for(dtype: torch.dtype):
    stored = STORED_AS[dtype]

    def work(pointer):
        _gate_tokens(pointer, stored)

    return compile_kernel(work, _GATES, f"delta_gates_{stored.__name__}", numbers=STRICT)


@njit(**STRICT_PART)
def _gate_tokens(pointer, stored):
    """Run one thread: process a few tokens at a time until no items are left."""
    a = carray(pointer, 1)[0]
    rates = floats(a.rates)
    offsets = floats(a.offsets)
    count = a.num_heads * a.width
    while True:
        item = count_up(pointer, NEXT)
        if item >= a.num_items:
            return
        for token in range(item * _ITEM_TOKENS, min((item + 1) * _ITEM_TOKENS, a.num_tokens)):
            step = pointer_to(a.step + token * a.step_stride, stored)
            write = pointer_to(a.write + token * a.write_stride, stored)
            decay = floats(a.decay + token * count * 4)
            strength = floats(a.strength + token * a.num_heads * 4)
            for place in range(count):
                decay[place] = rates[place // a.width] * softplus(
                    wide(step[place]) + offsets[place]
                )
            for head in range(a.num_heads):
                strength[head] = sigmoid(wide(write[head]))
        count_up(pointer, DONE)


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, team: Team, *, is_silu: bool
) -> Tensor:
    """Compute weight * x / sqrt(mean(x^2) + eps) * act(gate), rounded once.

    act is silu or else sigmoid. x is [T, H, D] fp32, dense; gate is [T, H, D] bf16 or fp32, dense
    within a token; weight is [D] fp32, dense. The result is [T, H, D] in gate's dtype.
    """
    out = torch.empty(x.shape, dtype=gate.dtype)
    num_tokens, num_heads, width = x.shape
    launch_integers(
        norm_for(gate.dtype),
        -(-num_tokens // _ITEM_TOKENS),
        (
            num_tokens,
            num_heads,
            width,
            x.data_ptr(),
            gate.data_ptr(),
            gate.stride(0) * gate.itemsize,
            weight.data_ptr(),
            out.data_ptr(),
            bits_of(eps),
            int(is_silu),
        ),
        team,
    )
    return out


@cache
def norm_for(dtype: torch.dtype):
    stored = STORED_AS[dtype]

    def work(pointer):
        _norm_tokens(pointer, stored)

    return compile_kernel(work, _NORM, f"gated_norm_{stored.__name__}", numbers=STRICT)


@njit(**STRICT_PART)
def _norm_tokens(pointer, stored):
    """Run one thread: process a few tokens at a time until no items are left."""
    a = carray(pointer, 1)[0]
    weight = floats(a.weight)
    size = size_of(stored)
    while True:
        item = count_up(pointer, NEXT)
        if item >= a.num_items:
            return
        for token in range(item * _ITEM_TOKENS, min((item + 1) * _ITEM_TOKENS, a.num_tokens)):
            for head in range(a.num_heads):
                place = (token * a.num_heads + head) * a.width
                gate = pointer_to(a.gate + token * a.gate_stride + head * a.width * size, stored)
                _norm_head(
                    a,
                    floats(a.x + place * 4),
                    gate,
                    weight,
                    pointer_to(a.out + place * size, stored),
                    stored,
                )
        count_up(pointer, DONE)


@njit(**STRICT_PART)
def _norm_head(a, x, gate, weight, out, stored):
    factor = np.float32(1) / np.sqrt(
        _sum_of_squares(x, a.width) / np.float32(a.width) + number_of(a.eps_bits)
    )
    for place in range(a.width):
        opened = wide(gate[place])
        act = sigmoid(opened)
        if a.is_silu:
            act *= opened
        out[place] = rounded(weight[place] * (x[place] * factor) * act, stored)


@njit(**STRICT_PART)
def _sum_of_squares(x, width):
    """Return the sum of eight partial sums, each of every eighth number."""
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = np.float32(0)
    whole = width // 8 * 8
    for at in range(0, whole, 8):
        s0 = fma(x[at], x[at], s0)
        s1 = fma(x[at + 1], x[at + 1], s1)
        s2 = fma(x[at + 2], x[at + 2], s2)
        s3 = fma(x[at + 3], x[at + 3], s3)
        s4 = fma(x[at + 4], x[at + 4], s4)
        s5 = fma(x[at + 5], x[at + 5], s5)
        s6 = fma(x[at + 6], x[at + 6], s6)
        s7 = fma(x[at + 7], x[at + 7], s7)
    for at in range(whole, width):
        s0 = fma(x[at], x[at], s0)
    return ((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7))


def gate_heads(x: Tensor, gate: Tensor, team: Team) -> Tensor:
    """Compute x * sigmoid(gate), with the sigmoid rounded before the product.

    x is [T, N], dense; gate is [T, N], dense within a token; both have one dtype, bf16 or fp32. The
    result is [T, N] of it.
    """
    out = torch.empty(x.shape, dtype=x.dtype)
    launch_integers(
        heads_for(x.dtype),
        -(-len(x) // _ITEM_TOKENS),
        (*x.shape, x.data_ptr(), gate.data_ptr(), gate.stride(0) * gate.itemsize, out.data_ptr()),
        team,
    )
    return out


@cache
def heads_for(dtype: torch.dtype):
    stored = STORED_AS[dtype]

    def work(pointer):
        _gate_heads(pointer, stored)

    return compile_kernel(work, _HEADS, f"gate_heads_{stored.__name__}", numbers=STRICT)


@njit(**STRICT_PART)
def _gate_heads(pointer, stored):
    """Run one thread: process a few tokens at a time until no items are left."""
    a = carray(pointer, 1)[0]
    size = size_of(stored)
    while True:
        item = count_up(pointer, NEXT)
        if item >= a.num_items:
            return
        for token in range(item * _ITEM_TOKENS, min((item + 1) * _ITEM_TOKENS, a.num_tokens)):
            first = token * a.width * size
            x = pointer_to(a.x + first, stored)
            out = pointer_to(a.out + first, stored)
            gate = pointer_to(a.gate + token * a.gate_stride, stored)
            for place in range(a.width):
                opened = rounded(sigmoid(wide(gate[place])), stored)
                out[place] = rounded(wide(x[place]) * wide(opened), stored)
        count_up(pointer, DONE)
