"""Moving cache entries: new keys and values to their pages, records to and from a contiguous buffer."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def write_kv_kernel(pool, k, v, pages, offsets, num_heads, page_size, head_dim, BLOCK: tl.constexpr):
    """One program per (token, part): part 0 stores k, part 1 stores v."""
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
    head, channel = at // head_dim, at % head_dim
    target = (((page * 2 + part) * num_heads + head) * page_size + offset) * head_dim + channel
    tl.store(pool + target, entry, mask=inside)


@triton.jit
def gather_records_kernel(records, indices, out, record_size, BLOCK: tl.constexpr):
    """One program per (index, block of a record)."""
    place = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < record_size
    source = tl.load(indices + place).to(tl.int64)
    tl.store(out + place * record_size + at, tl.load(records + source * record_size + at, mask=inside), mask=inside)


@triton.jit
def scatter_records_kernel(values, indices, records, record_size, BLOCK: tl.constexpr):
    """The other way round."""
    place = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < record_size
    target = tl.load(indices + place).to(tl.int64)
    tl.store(records + target * record_size + at, tl.load(values + place * record_size + at, mask=inside), mask=inside)


def write_kv(pool: Tensor, k: Tensor, v: Tensor, pages: Tensor, offsets: Tensor) -> None:
    """Store k, v [T, kv heads, D] at pool[pages[t], :, :, offsets[t]]; pool [num_pages, 2, kv heads, page_size, D]."""
    num_tokens, num_heads, head_dim = k.shape
    if not num_tokens:
        return
    write_kv_kernel[num_tokens, 2](pool, k.contiguous(), v.contiguous(), pages, offsets, num_heads, pool.shape[3],
                                   head_dim, BLOCK=triton.next_power_of_2(num_heads * head_dim))


def gather_records(records: Tensor, indices: Tensor) -> Tensor:
    """records [N, ...] contiguous, indices [n] int32 or int64. Returns [n, ...]: pages or slots side by side."""
    out = torch.empty(len(indices), *records.shape[1:], dtype=records.dtype, device=records.device)
    size = records[0].numel()
    if len(indices):
        gather_records_kernel[len(indices), triton.cdiv(size, _BLOCK)](records, indices, out, size, BLOCK=_BLOCK)
    return out


def scatter_records(values: Tensor, indices: Tensor, records: Tensor) -> None:
    """Store values [n, ...] as records[indices]; the indices must be distinct."""
    size = records[0].numel()
    if len(indices):
        scatter_records_kernel[len(indices), triton.cdiv(size, _BLOCK)](values.contiguous(), indices, records, size,
                                                                        BLOCK=_BLOCK)
