"""Recurrent layers over trees of new tokens.

Each token continues its parent's state and keeps its own. The formulas are those of
`engine/backends/gated_delta.py`. The shapes of the trees are data, so a captured call serves all
trees with the same number of rows and tokens.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHANNELS = 256
_COLUMNS = 32


@triton.jit
def conv_tree_kernel(
    x,
    weight,
    before,
    rows,
    slots,
    fresh,
    parents,
    after,
    targets,
    out,
    num_channels,
    KERNEL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Convolve along each token's path; one program per (token, block of channels).

    before and after are [records, KERNEL - 1, C]. All inputs are known, so a token walks up its
    path and then continues into its row's history.
    """
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < num_channels
    row = tl.load(rows + token)
    source = tl.load(slots + row).to(tl.int64) * (KERNEL - 1) * num_channels
    target = tl.load(targets + token).to(tl.int64) * (KERNEL - 1) * num_channels
    old_channels = tl.where(tl.load(fresh + row) == 0, num_channels, 0)
    new = tl.load(x + token * num_channels + channel, mask=inside, other=0.0)
    total = new.to(tl.float32) * tl.load(
        weight + channel * KERNEL + KERNEL - 1, mask=inside, other=0.0
    ).to(tl.float32)
    tl.store(after + target + (KERNEL - 2) * num_channels + channel, new, mask=inside)
    at = token
    num_old = 0
    for back in tl.static_range(1, KERNEL):
        parent = tl.load(parents + tl.maximum(at, 0)).to(tl.int64)
        at = tl.where(at >= 0, parent, -1)
        num_old += tl.where(at < 0, 1, 0)
        in_new = channel < tl.where(at >= 0, num_channels, 0)
        in_old = channel < tl.where(at < 0, old_channels, 0)
        above = tl.load(x + tl.maximum(at, 0) * num_channels + channel, mask=in_new, other=0.0)
        old = tl.load(
            before + source + (KERNEL - 1 - num_old) * num_channels + channel,
            mask=in_old,
            other=0.0,
        )
        taps = tl.load(weight + channel * KERNEL + KERNEL - 1 - back, mask=inside, other=0.0).to(
            tl.float32
        )
        total += (above.to(tl.float32) + old.to(tl.float32)) * taps
        if back < KERNEL - 1:
            tl.store(
                after + target + (KERNEL - 2 - back) * num_channels + channel,
                above + old,
                mask=inside,
            )
    tl.store(out + token * num_channels + channel, total / (1.0 + tl.exp(-total)), mask=inside)


@triton.jit
def delta_tree_kernel(
    q,
    k,
    v,
    g,
    beta,
    before,
    slots,
    fresh,
    starts,
    parents,
    after,
    targets,
    out,
    num_k_heads,
    num_v_heads,
    scale,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DK_BLOCK: tl.constexpr,
    DV_BLOCK: tl.constexpr,
):
    """Advance the states of a row's tokens; one program per (row, value head, block of DV).

    before and after are [records, Hv, DK, DV] fp32. Tokens are processed in order: parents come
    before their children, and a program reads back its own writes.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    channel = tl.arange(0, DK_BLOCK)
    column = tl.program_id(2) * DV_BLOCK + tl.arange(0, DV_BLOCK)
    in_row = channel < DK
    in_column = column < DV
    inside = in_row[:, None] & in_column[None, :]
    cell = (head * DK + channel)[:, None] * DV + column[None, :]
    size = num_v_heads * DK * DV
    root = tl.load(slots + row).to(tl.int64) * size
    is_fresh = tl.load(fresh + row) != 0
    k_head = head // (num_v_heads // num_k_heads)
    for token in range(tl.load(starts + row), tl.load(starts + row + 1)):
        at = (token * num_k_heads + k_head) * DK + channel
        key = tl.load(k + at, mask=in_row, other=0.0).to(tl.float32)
        query = tl.load(q + at, mask=in_row, other=0.0).to(tl.float32)
        key = key * tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
        query = query * tl.rsqrt(tl.sum(query * query, 0) + 1e-6) * scale
        parent = tl.load(parents + token)
        above = tl.load(targets + tl.maximum(parent, 0)).to(tl.int64) * size
        of_slot = channel < tl.where((parent < 0) & (is_fresh == 0), DK, 0)
        of_node = channel < tl.where(parent >= 0, DK, 0)
        state = tl.load(before + root + cell, mask=of_slot[:, None] & in_column[None, :], other=0.0)
        state += tl.load(
            after + above + cell, mask=of_node[:, None] & in_column[None, :], other=0.0
        )
        state *= tl.exp(tl.load(g + token * num_v_heads + head))
        value = tl.load(
            v + (token * num_v_heads + head) * DV + column, mask=in_column, other=0.0
        ).to(tl.float32)
        error = value - tl.sum(state * key[:, None], 0)
        state += key[:, None] * (tl.load(beta + token * num_v_heads + head) * error)[None, :]
        tl.store(after + tl.load(targets + token).to(tl.int64) * size + cell, state, mask=inside)
        tl.store(
            out + (token * num_v_heads + head) * DV + column,
            tl.sum(state * query[:, None], 0),
            mask=in_column,
        )
        tl.debug_barrier()  # for a child, one thread may read what another thread wrote


@dataclass(frozen=True)
class Trees:
    """R rows of T tokens, parents before children.

    All tensors except `fresh` are int64 on the device.

    Attributes:
        slots: [R], records of `before` that roots continue.
        fresh: [R], nonzero if that state is zero whatever the record holds.
        starts: [R + 1], the rows' first tokens, and the end.
        rows: [T], the row of each token.
        parents: [T], tokens of the batch; -1 for roots.
        targets: [T], records of `after` that the tokens write.
    """

    slots: Tensor
    fresh: Tensor
    starts: Tensor
    rows: Tensor
    parents: Tensor
    targets: Tensor


def conv_tree(x: Tensor, weight: Tensor, before: Tensor, after: Tensor, trees: Trees) -> Tensor:
    """Convolve along each token's path, write its history and return silu of the result, [T, C].

    x is [T, C]; weight is [C, K]; before and after are [records, K - 1, C] inputs, oldest first.
    """
    out = torch.empty_like(x)
    if len(x):
        grid = len(x), triton.cdiv(x.shape[1], _CHANNELS)
        conv_tree_kernel[grid](
            x,
            weight,
            before,
            trees.rows,
            trees.slots,
            trees.fresh,
            trees.parents,
            after,
            trees.targets,
            out,
            x.shape[1],
            KERNEL=weight.shape[1],
            BLOCK=_CHANNELS,
        )
    return out


def delta_tree(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    before: Tensor,
    after: Tensor,
    trees: Trees,
) -> Tensor:
    """Advance along each token's path, write its state and return [T, Hv, dv] fp32.

    q and k are [T, Hk, dk]; v is [T, Hv, dv]; g and beta are [T, Hv] fp32; before and after are
    [records, Hv, dk, dv] fp32.
    """
    num_tokens, num_v_heads, dv = v.shape
    num_k_heads, dk = q.shape[1:]
    out = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    if num_tokens:
        grid = len(trees.slots), num_v_heads, triton.cdiv(dv, _COLUMNS)
        delta_tree_kernel[grid](
            q,
            k,
            v,
            g,
            beta,
            before,
            trees.slots,
            trees.fresh,
            trees.starts,
            trees.parents,
            after,
            trees.targets,
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
