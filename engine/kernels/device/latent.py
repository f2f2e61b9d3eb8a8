"""Attention over compressed keys (MLA) with a list of entries per token, and index scores (DSA).

FlashInfer's wrapper for compressed keys has neither masks nor key selection; the lists cover both.
A node of a draft tree lists the committed keys, its ancestors and itself. A selecting layer lists
the selected keys.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS = 16
_KEYS = 32
_SCORED_KEYS = 128


@triton.jit
def listed_attention_kernel(
    q,
    entries,
    keys,
    out,
    num_heads,
    num_keys,
    scale,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
):
    """Attend with one token and H heads per program.

    keys is [T, num_keys] int32 slots, padded with -1.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * H + tl.arange(0, H)
    latent = tl.arange(0, LATENT_BLOCK)
    rope = tl.arange(0, ROPE_BLOCK)
    in_head = head < num_heads
    in_latent = latent < LATENT
    in_rope = rope < ROPE
    at = (token * num_heads + head)[:, None] * (LATENT + ROPE)
    q_latent = tl.load(
        q + at + latent[None, :], mask=in_head[:, None] & in_latent[None, :], other=0.0
    )
    q_rope = tl.load(
        q + at + LATENT + rope[None, :], mask=in_head[:, None] & in_rope[None, :], other=0.0
    )
    highest = tl.full((H,), float("-inf"), tl.float32)
    weight_sum = tl.zeros((H,), tl.float32)
    total = tl.zeros((H, LATENT_BLOCK), tl.float32)
    for start in range(0, num_keys, K):
        place = start + tl.arange(0, K)
        slot = tl.load(keys + token * num_keys + place, mask=place < num_keys, other=-1).to(
            tl.int64
        )
        there = slot >= 0
        base = tl.where(there, slot, 0)[:, None] * (LATENT + ROPE)
        c = tl.load(
            entries + base + latent[None, :], mask=there[:, None] & in_latent[None, :], other=0.0
        )
        r = tl.load(
            entries + base + LATENT + rope[None, :],
            mask=there[:, None] & in_rope[None, :],
            other=0.0,
        )
        scores = tl.dot(q_latent, tl.trans(c), input_precision="ieee")
        scores += tl.dot(q_rope, tl.trans(r), input_precision="ieee")
        scores = tl.where(there[None, :], scores * scale, float("-inf"))
        above = tl.maximum(highest, tl.max(scores, 1))
        base_score = tl.where(above == float("-inf"), 0.0, above)  # a block may have no keys yet
        weights = tl.exp(scores - base_score[:, None])
        shrink = tl.exp(highest - base_score)
        weight_sum = weight_sum * shrink + tl.sum(weights, 1)
        total = total * shrink[:, None] + tl.dot(weights.to(c.dtype), c, input_precision="ieee")
        highest = above
    result = total / weight_sum[:, None]
    out_at = (token * num_heads + head)[:, None] * LATENT + latent[None, :]
    tl.store(out + out_at, result, mask=in_head[:, None] & in_latent[None, :])


def listed_attention(
    q: Tensor, entries: Tensor, keys: Tensor, *, latent_dim: int, scale: float
) -> Tensor:
    """Attend to the listed entries and return [T, heads, latent_dim].

    q is [T, heads, entry_dim]; entries is [slots, entry_dim]; keys is [T, n] int32, with at least
    one slot per token, padded with -1.
    """
    num_tokens, num_heads, entry_dim = q.shape
    out = torch.empty(num_tokens, num_heads, latent_dim, dtype=q.dtype, device=q.device)
    if num_tokens:
        rope_dim = entry_dim - latent_dim
        listed_attention_kernel[num_tokens, triton.cdiv(num_heads, _HEADS)](
            q,
            entries,
            keys,
            out,
            num_heads,
            keys.shape[1],
            scale,
            LATENT=latent_dim,
            ROPE=rope_dim,
            LATENT_BLOCK=max(16, triton.next_power_of_2(latent_dim)),
            ROPE_BLOCK=max(16, triton.next_power_of_2(rope_dim)),
            H=_HEADS,
            K=_KEYS,
        )
    return out


@triton.jit
def index_scores_kernel(
    q,
    index_keys,
    head_weights,
    tables,
    token_rows,
    lengths,
    out,
    num_heads,
    num_pages,
    num_keys,
    scale,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    H: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Score one token with KEYS keys of its row per program."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    there = place < tl.load(lengths + token)
    page = tl.load(
        tables + tl.load(token_rows + token) * num_pages + place // PAGE, mask=there, other=0
    )
    dim = tl.arange(0, DIM_BLOCK)
    key_at = (page * PAGE + place % PAGE)[:, None] * DIM + dim[None, :]
    key = tl.load(index_keys + key_at, mask=there[:, None] & (dim < DIM)[None, :], other=0.0)
    total = tl.zeros((KEYS,), tl.float32)
    for first in range(0, num_heads, H):
        head = first + tl.arange(0, H)
        q_at = (token * num_heads + head)[:, None] * DIM + dim[None, :]
        query = tl.load(
            q + q_at, mask=(head < num_heads)[:, None] & (dim < DIM)[None, :], other=0.0
        )
        weight = tl.load(head_weights + token * num_heads + head, mask=head < num_heads, other=0.0)
        products = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        total += tl.sum(tl.maximum(products, 0.0) * weight[:, None], 0)
    tl.store(
        out + token * num_keys + place, tl.where(there, total, float("-inf")), mask=place < num_keys
    )


def index_scores(
    q: Tensor,
    index_keys: Tensor,
    head_weights: Tensor,
    tables: Tensor,
    token_rows: Tensor,
    lengths: Tensor,
    *,
    num_keys: int,
    page_size: int,
) -> Tensor:
    """Return sum_h weight_h * relu(q_h . k_s * D^-0.5), [T, num_keys] fp32.

    The result is -inf from each row's length on. q is [T, heads, D]; index_keys is [slots, D];
    head_weights is [T, heads] fp32; tables [R, pages], token_rows [T] and lengths [T] (the number
    of keys of the token's row) are int64.
    """
    num_tokens, num_heads, head_dim = q.shape
    out = torch.empty(num_tokens, num_keys, dtype=torch.float32, device=q.device)
    if num_tokens and num_keys:
        index_scores_kernel[num_tokens, triton.cdiv(num_keys, _SCORED_KEYS)](
            q,
            index_keys,
            head_weights,
            tables,
            token_rows,
            lengths,
            out,
            num_heads,
            tables.shape[1],
            num_keys,
            head_dim**-0.5,
            PAGE=page_size,
            DIM=head_dim,
            DIM_BLOCK=max(16, triton.next_power_of_2(head_dim)),
            H=_HEADS,
            KEYS=_SCORED_KEYS,
        )
    return out
