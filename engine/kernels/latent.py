"""Attention of each token to a list of cache entries of its own, over compressed keys (MLA).

FlashInfer's wrapper for compressed keys knows neither masks nor choices; this covers both: a node of a draft tree
lists the committed keys, its ancestors and itself; a layer that chooses lists what it chose.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS, _KEYS = 16, 32


@triton.jit
def listed_attention_kernel(q, entries, keys, out, num_heads, num_keys, scale, LATENT: tl.constexpr, ROPE: tl.constexpr,
                            LATENT_BLOCK: tl.constexpr, ROPE_BLOCK: tl.constexpr, H: tl.constexpr, K: tl.constexpr):
    """One program per (token, H heads). keys [T, num_keys] int32 slots, -1 for none."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * H + tl.arange(0, H)
    latent, rope = tl.arange(0, LATENT_BLOCK), tl.arange(0, ROPE_BLOCK)
    in_head, in_latent, in_rope = head < num_heads, latent < LATENT, rope < ROPE
    at = (token * num_heads + head)[:, None] * (LATENT + ROPE)
    q_latent = tl.load(q + at + latent[None, :], mask=in_head[:, None] & in_latent[None, :], other=0.0)
    q_rope = tl.load(q + at + LATENT + rope[None, :], mask=in_head[:, None] & in_rope[None, :], other=0.0)
    highest = tl.full((H,), float("-inf"), tl.float32)
    weight_sum = tl.zeros((H,), tl.float32)
    total = tl.zeros((H, LATENT_BLOCK), tl.float32)
    for start in range(0, num_keys, K):
        place = start + tl.arange(0, K)
        slot = tl.load(keys + token * num_keys + place, mask=place < num_keys, other=-1).to(tl.int64)
        there = slot >= 0
        base = tl.where(there, slot, 0)[:, None] * (LATENT + ROPE)
        c = tl.load(entries + base + latent[None, :], mask=there[:, None] & in_latent[None, :], other=0.0)
        r = tl.load(entries + base + LATENT + rope[None, :], mask=there[:, None] & in_rope[None, :], other=0.0)
        scores = tl.dot(q_latent, tl.trans(c), input_precision="ieee")
        scores += tl.dot(q_rope, tl.trans(r), input_precision="ieee")
        scores = tl.where(there[None, :], scores * scale, float("-inf"))
        above = tl.maximum(highest, tl.max(scores, 1))
        base_score = tl.where(above == float("-inf"), 0.0, above)  # a block may list nothing yet
        weights = tl.exp(scores - base_score[:, None])
        shrink = tl.exp(highest - base_score)
        weight_sum = weight_sum * shrink + tl.sum(weights, 1)
        total = total * shrink[:, None] + tl.dot(weights.to(c.dtype), c, input_precision="ieee")
        highest = above
    result = total / weight_sum[:, None]
    out_at = (token * num_heads + head)[:, None] * LATENT + latent[None, :]
    tl.store(out + out_at, result, mask=in_head[:, None] & in_latent[None, :])


def listed_attention(q: Tensor, entries: Tensor, keys: Tensor, *, latent_dim: int, scale: float) -> Tensor:
    """q [T, heads, entry_dim]; entries [slots, entry_dim]; keys [T, n] int32, at least one slot per token, -1 for none.
    Returns [T, heads, latent_dim]."""
    num_tokens, num_heads, entry_dim = q.shape
    out = torch.empty(num_tokens, num_heads, latent_dim, dtype=q.dtype, device=q.device)
    if num_tokens:
        rope_dim = entry_dim - latent_dim
        listed_attention_kernel[num_tokens, triton.cdiv(num_heads, _HEADS)](
            q, entries, keys, out, num_heads, keys.shape[1], scale, LATENT=latent_dim, ROPE=rope_dim,
            LATENT_BLOCK=max(16, triton.next_power_of_2(latent_dim)),
            ROPE_BLOCK=max(16, triton.next_power_of_2(rope_dim)), H=_HEADS, K=_KEYS)
    return out
