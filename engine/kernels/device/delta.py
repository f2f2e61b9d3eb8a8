"""Causal convolution and delta rule step, one token or one tree node per program.

The formulas are those of `engine/backends/gated_delta.py`. A token reads one record and writes one.
In decode both are its row's slot; in verification it reads its parent's record and writes its own.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHANNELS = 256
_COLUMNS = 32


@triton.jit
def conv_step_kernel(
    x,
    weight,
    before,
    sources,
    after,
    targets,
    fresh,
    out,
    num_channels,
    KERNEL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Convolve one token; one program per (token, block of channels).

    before and after are [records, KERNEL - 1, C].
    """
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < num_channels
    source = tl.load(sources + token).to(tl.int64) * (KERNEL - 1) * num_channels
    target = tl.load(targets + token).to(tl.int64) * (KERNEL - 1) * num_channels
    in_old = channel < tl.where(tl.load(fresh + token) == 0, num_channels, 0)
    new = tl.load(x + token * num_channels + channel, mask=inside, other=0.0)
    total = new.to(tl.float32) * tl.load(
        weight + channel * KERNEL + KERNEL - 1, mask=inside, other=0.0
    ).to(tl.float32)
    for tap in tl.static_range(KERNEL - 1):
        old = tl.load(before + source + tap * num_channels + channel, mask=in_old, other=0.0)
        total += old.to(tl.float32) * tl.load(
            weight + channel * KERNEL + tap, mask=inside, other=0.0
        ).to(tl.float32)
        if tap > 0:
            tl.store(after + target + (tap - 1) * num_channels + channel, old, mask=inside)
    tl.store(after + target + (KERNEL - 2) * num_channels + channel, new, mask=inside)
    tl.store(out + token * num_channels + channel, total / (1.0 + tl.exp(-total)), mask=inside)


@triton.jit
def delta_step_kernel(
    q,
    k,
    v,
    g,
    beta,
    before,
    sources,
    after,
    targets,
    fresh,
    out,
    num_k_heads,
    num_v_heads,
    scale,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DK_BLOCK: tl.constexpr,
    DV_BLOCK: tl.constexpr,
):
    """Advance the state by one token; one program per (token, value head, block of DV).

    before and after are [records, Hv, DK, DV] fp32.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = tl.arange(0, DK_BLOCK)
    column = tl.program_id(2) * DV_BLOCK + tl.arange(0, DV_BLOCK)
    in_row = row < DK
    in_column = column < DV
    k_head = head // (num_v_heads // num_k_heads)
    at = (token * num_k_heads + k_head) * DK + row
    key = tl.load(k + at, mask=in_row, other=0.0).to(tl.float32)
    query = tl.load(q + at, mask=in_row, other=0.0).to(tl.float32)
    key *= tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
    query *= tl.rsqrt(tl.sum(query * query, 0) + 1e-6) * scale
    inside = in_row[:, None] & in_column[None, :]
    cell = row[:, None] * DV + column[None, :]
    source = (tl.load(sources + token).to(tl.int64) * num_v_heads + head) * DK * DV
    old_rows = tl.where(tl.load(fresh + token) == 0, DK, 0)
    in_old = (row < old_rows)[:, None] & in_column[None, :]
    state = tl.load(before + source + cell, mask=in_old, other=0.0)
    state *= tl.exp(tl.load(g + token * num_v_heads + head))
    value = tl.load(v + (token * num_v_heads + head) * DV + column, mask=in_column, other=0.0).to(
        tl.float32
    )
    error = value - tl.sum(state * key[:, None], 0)
    state += key[:, None] * (tl.load(beta + token * num_v_heads + head) * error)[None, :]
    target = (tl.load(targets + token).to(tl.int64) * num_v_heads + head) * DK * DV
    tl.store(after + target + cell, state, mask=inside)
    tl.store(
        out + (token * num_v_heads + head) * DV + column,
        tl.sum(state * query[:, None], 0),
        mask=in_column,
    )


@dataclass(frozen=True)
class Moves:
    """The record that each token reads and the record that it writes.

    In one call no record is read by one token and written by another.

    Attributes:
        sources, targets: [T] int64, records of `before` and `after`.
        fresh: [T] bool, True if the state is zero whatever the source holds.
    """

    sources: Tensor
    targets: Tensor
    fresh: Tensor


def conv_step(x: Tensor, weight: Tensor, before: Tensor, after: Tensor, moves: Moves) -> Tensor:
    """Convolve one token per record, write the new histories and return silu of the result, [T, C].

    x is [T, C]; weight is [C, K]; before and after are [records, K - 1, C] inputs, oldest first.
    """
    out = torch.empty_like(x)
    if len(x):
        grid = len(x), triton.cdiv(x.shape[1], _CHANNELS)
        conv_step_kernel[grid](
            x,
            weight,
            before,
            moves.sources,
            after,
            moves.targets,
            moves.fresh,
            out,
            x.shape[1],
            KERNEL=weight.shape[1],
            BLOCK=_CHANNELS,
        )
    return out


def delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    before: Tensor,
    after: Tensor,
    moves: Moves,
) -> Tensor:
    """Advance one token per record, write the new states and return [T, Hv, dv] fp32.

    q and k are [T, Hk, dk]; v is [T, Hv, dv]; g and beta are [T, Hv] fp32; before and after are
    [records, Hv, dk, dv] fp32.
    """
    num_tokens, num_v_heads, dv = v.shape
    num_k_heads, dk = q.shape[1:]
    out = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    if num_tokens:
        grid = num_tokens, num_v_heads, triton.cdiv(dv, _COLUMNS)
        delta_step_kernel[grid](
            q,
            k,
            v,
            g,
            beta,
            before,
            moves.sources,
            after,
            moves.targets,
            moves.fresh,
            out,
            num_k_heads,
            num_v_heads,
            dk**-0.5,
            DK=dk,
            DV=dv,
            DK_BLOCK=triton.next_power_of_2(dk),
            DV_BLOCK=_COLUMNS,
        )
    return out
