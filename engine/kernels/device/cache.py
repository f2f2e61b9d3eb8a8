"""Storage of new keys and values in their pages."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def write_kv_kernel(
    pool, k, v, pages, offsets, num_heads, page_size, head_dim, BLOCK: tl.constexpr
):
    """Store k (part 0) or v (part 1); one program per (token, part)."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    page = tl.load(pages + token)
    offset = tl.load(offsets + token)
    at = tl.arange(0, BLOCK)
    inside = at < num_heads * head_dim
    source = token * num_heads * head_dim + at
    if part == 0:
        entry = tl.load(k + source, mask=inside)
    else:
        entry = tl.load(v + source, mask=inside)
    head = at // head_dim
    channel = at % head_dim
    target = (((page * 2 + part) * num_heads + head) * page_size + offset) * head_dim + channel
    tl.store(pool + target, entry, mask=inside)


def write_kv(pool: Tensor, k: Tensor, v: Tensor, pages: Tensor, offsets: Tensor) -> None:
    """Store k and v [T, kv heads, D] at pool[pages[t], :, :, offsets[t]].

    pool is [num_pages, 2, kv heads, page_size, D].
    """
    num_tokens, num_heads, head_dim = k.shape
    if not num_tokens:
        return
    write_kv_kernel[num_tokens, 2](
        pool,
        k.contiguous(),
        v.contiguous(),
        pages,
        offsets,
        num_heads,
        pool.shape[3],
        head_dim,
        BLOCK=triton.next_power_of_2(num_heads * head_dim),
    )
