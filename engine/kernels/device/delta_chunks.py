"""Chunked delta rule over rows of any length, 64 tokens at a time.

The formulas are those of `engine/backends/gated_delta.py`. All chunks compute concurrently what
needs no state: the inverse of their triangular system, and its products with keys and values. The
scan over the chunks of a row has four products per chunk; more would not fit into registers. All
products run on tensor cores. Operands have 11 bits if q has 8 (bf16), otherwise three times as
many.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.delta_rule import CHUNK
from engine.kernels.device.prompts import PromptRows

_COLUMNS = 32
# For narrower keys Triton 3.6 emits three-pass tf32 products that read past their shared memory.
_MIN_KEY_BLOCK = 64
# With fewer warps, or with prefetched loads, a program's part of the products fits neither
# registers nor shared memory.
OPTIONS = {"num_warps": 8, "num_stages": 1}


@triton.jit
def _heads_of_chunk(x, first, count, heads, head, width, C: tl.constexpr, W_BLOCK: tl.constexpr):
    """Load `count` tokens of one head from `first` on as fp32 [C, W_BLOCK], padded with zeros."""
    token = tl.arange(0, C)
    channel = tl.arange(0, W_BLOCK)
    inside = (token < count)[:, None] & (channel < width)[None, :]
    at = ((first + token)[:, None] * heads + head) * width + channel[None, :]
    return tl.load(x + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _unit(x):
    return x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]


@triton.jit
def _decays(g, first, count, heads, head, C: tl.constexpr):
    """Return the running sum G of a chunk [C], and [C, C] e^(G_i - G_j) for j <= i, else 0."""
    token = tl.arange(0, C)
    total = tl.cumsum(tl.load(g + (first + token) * heads + head, mask=token < count, other=0.0), 0)
    lower = token[:, None] >= token[None, :]
    return total, tl.where(
        lower, tl.exp(tl.where(lower, total[:, None] - total[None, :], 0.0)), 0.0
    )


@triton.jit
def chunk_inverse_kernel(
    k,
    g,
    beta,
    firsts,
    counts,
    inverses,
    num_k_heads,
    num_v_heads,
    DK: tl.constexpr,
    DK_BLOCK: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute (I + strict_lower(diag(beta) K K^T * D))^-1, [N, Hv, C, C], row by row.

    There is one program per (chunk, head).
    """
    chunk = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first = tl.load(firsts + chunk).to(tl.int64)
    count = tl.load(counts + chunk)
    token = tl.arange(0, C)
    key = _unit(
        _heads_of_chunk(
            k, first, count, num_k_heads, head // (num_v_heads // num_k_heads), DK, C, DK_BLOCK
        )
    )
    _, decay = _decays(g, first, count, num_v_heads, head, C)
    rate = tl.load(beta + (first + token) * num_v_heads + head, mask=token < count, other=0.0)
    system = rate[:, None] * tl.dot(key, tl.trans(key), input_precision=PRECISION) * decay
    system = tl.where(token[:, None] > token[None, :], system, 0.0)
    inverse = tl.where(token[:, None] == token[None, :], 1.0, 0.0)
    for row in range(1, C):
        is_row = token == row
        factors = tl.sum(tl.where(is_row[:, None], system, 0.0), 0)
        inverse -= tl.where(is_row[:, None], tl.sum(factors[:, None] * inverse, 0)[None, :], 0.0)
    at = (chunk * num_v_heads + head) * C * C + token[:, None] * C + token[None, :]
    tl.store(inverses + at, inverse)


@triton.jit
def chunk_prepare_kernel(
    q,
    k,
    v,
    g,
    beta,
    inverses,
    firsts,
    counts,
    removals,
    additions,
    queries,
    faded,
    scores,
    lasts,
    num_k_heads,
    num_v_heads,
    scale,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DK_BLOCK: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the inputs of the scan; one program per (chunk, value head).

    All outputs but `lasts` are [N, Hv, C, ...].

    Outputs:
        removals: [..., DK_BLOCK], the part of the state by key that a token's update removes.
        additions: [..., DV], the values that the update adds.
        queries: [..., DK_BLOCK], queries times the decay since the start of the chunk.
        faded: [..., DK_BLOCK], keys times the decay until the end of the chunk.
        scores: [..., C], scores of queries and keys within the chunk.
        lasts: [N, Hv], the decay of the whole chunk.
    """
    chunk = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first = tl.load(firsts + chunk).to(tl.int64)
    count = tl.load(counts + chunk)
    k_head = head // (num_v_heads // num_k_heads)
    token = tl.arange(0, C)
    channel = tl.arange(0, DK_BLOCK)
    total, decay = _decays(g, first, count, num_v_heads, head, C)
    grown = tl.exp(total)[:, None]
    last = tl.sum(tl.where(token == C - 1, total, 0.0), 0)
    rate = tl.load(beta + (first + token) * num_v_heads + head, mask=token < count, other=0.0)[
        :, None
    ]
    place = chunk * num_v_heads + head
    square = (place * C + token)[:, None] * C + token[None, :]
    wide = (place * C + token)[:, None] * DK_BLOCK + channel[None, :]
    inverse = tl.load(inverses + square)
    key = _unit(_heads_of_chunk(k, first, count, num_k_heads, k_head, DK, C, DK_BLOCK))
    tl.store(faded + wide, key * tl.exp(last - total)[:, None])
    tl.store(removals + wide, tl.dot(inverse, rate * grown * key, input_precision=PRECISION))
    query = _unit(_heads_of_chunk(q, first, count, num_k_heads, k_head, DK, C, DK_BLOCK)) * scale
    tl.store(queries + wide, grown * query)
    tl.store(scores + square, tl.dot(query, tl.trans(key), input_precision=PRECISION) * decay)
    for start in range(0, DV, DV_BLOCK):
        column = start + tl.arange(0, DV_BLOCK)
        at = ((first + token)[:, None] * num_v_heads + head) * DV + column[None, :]
        value = tl.load(
            v + at, mask=(token < count)[:, None] & (column < DV)[None, :], other=0.0
        ).to(tl.float32)
        added = tl.dot(inverse, rate * value, input_precision=PRECISION)
        tl.store(
            additions + (place * C + token)[:, None] * DV + column[None, :],
            added,
            mask=(column < DV)[None, :],
        )
    tl.store(lasts + place, tl.exp(last))


@triton.jit
def chunk_scan_kernel(
    removals,
    additions,
    queries,
    faded,
    scores,
    lasts,
    firsts,
    counts,
    row_chunks,
    states,
    slots,
    fresh,
    out,
    num_v_heads,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DK_BLOCK: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Run the chunks of a row in order; one program per (row, value head, block of DV).

    states is [records, Hv, DK, DV] and is updated in place.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    token = tl.arange(0, C)
    channel = tl.arange(0, DK_BLOCK)
    column = tl.program_id(2) * DV_BLOCK + tl.arange(0, DV_BLOCK)
    cell = ((tl.load(slots + row).to(tl.int64) * num_v_heads + head) * DK + channel)[
        :, None
    ] * DV + column[None, :]
    inside = (channel < DK)[:, None] & (column < DV)[None, :]
    old_rows = tl.where(tl.load(fresh + row) == 0, DK, 0)
    in_old = (channel < old_rows)[:, None] & (column < DV)[None, :]
    state = tl.load(states + cell, mask=in_old, other=0.0)
    for chunk in range(tl.load(row_chunks + row), tl.load(row_chunks + row + 1)):
        first = tl.load(firsts + chunk).to(tl.int64)
        count = tl.load(counts + chunk)
        place = tl.cast(chunk, tl.int64) * num_v_heads + head
        wide = (place * C + token)[:, None] * DK_BLOCK + channel[None, :]
        added = tl.load(
            additions + (place * C + token)[:, None] * DV + column[None, :],
            mask=(column < DV)[None, :],
            other=0.0,
        )
        update = added - tl.dot(tl.load(removals + wide), state, input_precision=PRECISION)
        result = tl.dot(tl.load(queries + wide), state, input_precision=PRECISION)
        inner = tl.load(scores + (place * C + token)[:, None] * C + token[None, :])
        result += tl.dot(inner, update, input_precision=PRECISION)
        at = ((first + token)[:, None] * num_v_heads + head) * DV + column[None, :]
        tl.store(out + at, result, mask=(token < count)[:, None] & (column < DV)[None, :])
        state = tl.load(lasts + place) * state + tl.dot(
            tl.trans(tl.load(faded + wide)), update, input_precision=PRECISION
        )
    tl.store(states + cell, state, mask=inside)


class _ScanInputs(NamedTuple):
    """The inputs of the scan, in the order of its arguments; see `chunk_prepare_kernel`."""

    removals: Tensor
    additions: Tensor
    queries: Tensor
    faded: Tensor
    scores: Tensor
    lasts: Tensor


def delta_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    rows: PromptRows,
) -> Tensor:
    """Process rows of new tokens, each starting on the 64-token grid.

    q and k are [T, Hk, dk]; v is [T, Hv, dv]; g and beta are [T, Hv] fp32; states is [records, Hv,
    dk, dv] fp32. Write the new states and return [T, Hv, dv] fp32. Rows without tokens keep their
    state.
    """
    num_v_heads, dv = v.shape[1:]
    out = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    if not len(rows.chunk_starts):
        return out
    inputs = _prepare(q, k, v, g, beta, rows)
    chunk_scan_kernel[len(rows.slots), num_v_heads, triton.cdiv(dv, _COLUMNS)](
        *inputs,
        rows.chunk_starts,
        rows.chunk_sizes,
        rows.row_chunks,
        states,
        rows.slots,
        rows.fresh,
        out,
        num_v_heads,
        DV=dv,
        DV_BLOCK=_COLUMNS,
        **_constants(q),
    )
    return out


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, rows: PromptRows
) -> _ScanInputs:
    """Compute what needs no state, for all chunks concurrently."""
    num_v_heads, dv = v.shape[1:]
    num_k_heads, dk = q.shape[1:]
    num_chunks = len(rows.chunk_starts)
    constants = _constants(q)
    dk_block = constants["DK_BLOCK"]
    inverses, scores, removals, queries, faded, additions = (
        torch.empty(num_chunks, num_v_heads, CHUNK, width, dtype=torch.float32, device=v.device)
        for width in (CHUNK, CHUNK, dk_block, dk_block, dk_block, dv)
    )
    lasts = torch.empty(num_chunks, num_v_heads, dtype=torch.float32, device=v.device)
    chunk_inverse_kernel[num_chunks, num_v_heads](
        k,
        g,
        beta,
        rows.chunk_starts,
        rows.chunk_sizes,
        inverses,
        num_k_heads,
        num_v_heads,
        **constants,
    )
    inputs = _ScanInputs(removals, additions, queries, faded, scores, lasts)
    chunk_prepare_kernel[num_chunks, num_v_heads](
        q,
        k,
        v,
        g,
        beta,
        inverses,
        rows.chunk_starts,
        rows.chunk_sizes,
        *inputs,
        num_k_heads,
        num_v_heads,
        dk**-0.5,
        DV=dv,
        DV_BLOCK=_COLUMNS,
        **constants,
    )
    return inputs


def _constants(q: Tensor) -> dict[str, Any]:
    """Return the constants and options that all three kernels are compiled with."""
    dk = q.shape[2]
    return {
        "DK": dk,
        "DK_BLOCK": max(_MIN_KEY_BLOCK, triton.next_power_of_2(dk)),
        "C": CHUNK,
        "PRECISION": "tf32" if q.dtype is torch.bfloat16 else "tf32x3",
        **OPTIONS,
    }
