"""Paged attention for heads without FlashInfer kernels: narrow heads and fp32."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_KEYS = 32


@triton.jit
def paged_attention_kernel(
    q,
    cache,
    indices,
    first_pages,
    begins,
    limits,
    mask,
    mask_starts,
    out,
    num_heads,
    num_kv_heads,
    page_size,
    scale,
    SHARE: tl.constexpr,
    D: tl.constexpr,
    D_BLOCK: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attend with one token and the SHARE query heads of one kv head per program.

    cache is [pages, 2, kv heads, page, D].
    """
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    member = tl.arange(0, H)
    channel = tl.arange(0, D_BLOCK)
    inside = (member < SHARE)[:, None] & (channel < D)[None, :]
    at = (token * num_heads + kv_head * SHARE + member)[:, None] * D + channel[None, :]
    query = tl.load(q + at, mask=inside, other=0.0)
    pages = indices + tl.load(first_pages + token)
    begin = tl.load(begins + token)
    limit = tl.load(limits + token)
    highest = tl.full((H,), float("-inf"), tl.float32)
    weight_sum = tl.zeros((H,), tl.float32)
    total = tl.zeros((H, D_BLOCK), tl.float32)
    for start in range(begin // K * K, limit, K):
        place = start + tl.arange(0, K)
        there = (place >= begin) & (place < limit)
        if MASKED:
            there = there & (
                tl.load(mask + tl.load(mask_starts + token) + place, mask=there, other=0) != 0
            )
        page = tl.load(pages + place // page_size, mask=there, other=0).to(tl.int64)
        record = ((page * 2 * num_kv_heads + kv_head) * page_size + place % page_size)[
            :, None
        ] * D + channel[None, :]
        wanted = there[:, None] & (channel < D)[None, :]
        key = tl.load(cache + record, mask=wanted, other=0.0)
        value = tl.load(cache + record + num_kv_heads * page_size * D, mask=wanted, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(there[None, :], scores, float("-inf"))
        above = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(above == float("-inf"), 0.0, above)  # a block may have no visible keys
        weights = tl.exp(scores - base[:, None])
        shrink = tl.exp(highest - base)
        weight_sum = weight_sum * shrink + tl.sum(weights, 1)
        total = total * shrink[:, None] + tl.dot(
            weights.to(value.dtype), value, input_precision="ieee"
        )
        highest = above
    tl.store(out + at, total / weight_sum[:, None], mask=inside)


def paged_attention(
    q: Tensor,
    cache: Tensor,
    indices: Tensor,
    first_pages: Tensor,
    begins: Tensor,
    limits: Tensor,
    mask: Tensor | None,
    mask_starts: Tensor,
    *,
    scale: float,
) -> Tensor:
    """Attend to the visible keys of each token and return [T, heads, D].

    A token sees the keys from begins[t] to before limits[t], with a mask only those that are True.
    Each token must see at least one key. Integer tensors are int32 or int64.

    Args:
        q: [T, heads, D], contiguous.
        cache: [pages, 2, kv heads, page_size, D].
        indices: [n] int32 page ids.
        first_pages: [T], the index in `indices` of the first page of the token's row.
        begins, limits: [T], the range of visible keys.
        mask: [...] bool, or None.
        mask_starts: [T], the index in `mask` of the first key of the token's row.
    """
    num_tokens, num_heads, dim = q.shape
    num_kv_heads, page_size = cache.shape[2:4]
    share = num_heads // num_kv_heads
    out = torch.empty_like(q)
    if num_tokens:
        paged_attention_kernel[num_tokens, num_kv_heads](
            q,
            cache,
            indices,
            first_pages,
            begins,
            limits,
            indices if mask is None else mask.view(torch.uint8),
            mask_starts,
            out,
            num_heads,
            num_kv_heads,
            page_size,
            scale,
            SHARE=share,
            D=dim,
            D_BLOCK=max(16, triton.next_power_of_2(dim)),
            H=max(16, triton.next_power_of_2(share)),
            K=_KEYS,
            MASKED=mask is not None,
        )
    return out
