"""A digest of cache records that a device computes at the speed of its memory.

Sum over the record's 64-bit words w_i of mix(w_i + (i + 1) * PHI + seed), modulo 2^64, with mix the finaliser of
SplitMix64 (Steele, Lea, Flood, 2014). A sum can be taken in any order; the index inside keeps words from trading
places unseen.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
_PHI, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@triton.jit
def digest_kernel(words, seeds, out, num_words, PHI: tl.constexpr, MIX_1: tl.constexpr, MIX_2: tl.constexpr,
                  BLOCK: tl.constexpr):
    """One program per record; words [n, num_words]."""
    record = tl.program_id(0).to(tl.int64)
    seed = tl.load(seeds + record).to(tl.uint64, bitcast=True)
    total = tl.zeros((BLOCK,), dtype=tl.uint64)
    for start in range(0, num_words, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < num_words
        word = tl.load(words + record * num_words + at, mask=inside, other=0).to(tl.uint64, bitcast=True)
        x = word + (at + 1).to(tl.uint64) * PHI + seed
        x = (x ^ (x >> 30)) * MIX_1
        x = (x ^ (x >> 27)) * MIX_2
        total += tl.where(inside, x ^ (x >> 31), 0)
    tl.store(out + record, tl.sum(total, 0).to(tl.int64, bitcast=True))


def record_digests(records: Tensor, seeds: Tensor) -> Tensor:
    """records [n, ...] contiguous, of a multiple of 8 bytes each; seeds [n] int64. Returns [n] int64."""
    words = records.flatten(1).view(torch.int64)
    out = torch.empty(len(records), dtype=torch.int64, device=records.device)
    if len(records):
        digest_kernel[len(records),](words, seeds, out, words.shape[1], PHI=_PHI, MIX_1=_MIX_1, MIX_2=_MIX_2,
                                     BLOCK=_BLOCK)
    return out
