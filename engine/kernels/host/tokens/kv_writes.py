"""The storage of keys and values in the pages of a cache, on the host.

It is one pass over the tokens. torch needs two.
"""

from functools import cache

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from engine.kernels.host.codegen.compiled import (
    DONE,
    NEXT,
    PART,
    STORED_AS,
    Team,
    compile_kernel,
    count_up,
    launch_integers,
    pointer_to,
    record,
)
from engine.kernels.host.codegen.strided_loops import size_of
from runtime.errors import InternalError

_ITEM_TOKENS = 16
_WRITES = record(
    "num_tokens",
    "num_heads",
    "width",
    "page_size",
    "page_values",
    "k",
    "k_stride",
    "v",
    "v_stride",
    "pages",
    "write_pages",
    "write_offsets",
)


def write_tokens(
    k: Tensor, v: Tensor, pages: Tensor, write_pages: Tensor, write_offsets: Tensor, team: Team
) -> None:
    """Copy k and v [T, heads, D] to pages [P, 2 (k, v), heads, page_size, D].

    Token t is stored in page write_pages[t] at write_offsets[t], both [T] int64. k and v are dense
    within a token, pages is dense, and all have one dtype, bf16 or fp32.

    Raises:
        InternalError: the shapes do not match.
    """
    num_tokens, num_heads, width = k.shape
    if (v.shape, pages.shape[2], pages.shape[4], *write_pages.shape, *write_offsets.shape) != (
        k.shape,
        num_heads,
        width,
        num_tokens,
        num_tokens,
    ):
        raise InternalError(
            f"k {tuple(k.shape)} and v {tuple(v.shape)} for {len(write_pages)} places in pages of "
            f"{tuple(pages.shape[1:])}"
        )
    launch_integers(
        writes_for(k.dtype),
        -(-num_tokens // _ITEM_TOKENS),
        (
            num_tokens,
            num_heads,
            width,
            pages.shape[3],
            pages.stride(1),
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            pages.data_ptr(),
            write_pages.data_ptr(),
            write_offsets.data_ptr(),
        ),
        team,
    )


@cache
def writes_for(dtype: torch.dtype):
    stored = STORED_AS[dtype]

    def work(pointer):
        _write_tokens(pointer, stored)

    return compile_kernel(work, _WRITES, f"write_tokens_{stored.__name__}")


@njit(**PART)
def _write_tokens(pointer, stored):
    """Run one thread: process a few tokens at a time until no items are left."""
    a = carray(pointer, 1)[0]
    size = size_of(stored)
    write_pages = carray(pointer_to(a.write_pages, np.int64), a.num_tokens)
    write_offsets = carray(pointer_to(a.write_offsets, np.int64), a.num_tokens)
    while True:
        item = count_up(pointer, NEXT)
        if item >= a.num_items:
            return
        for token in range(item * _ITEM_TOKENS, min((item + 1) * _ITEM_TOKENS, a.num_tokens)):
            page = a.pages + 2 * write_pages[token] * a.page_values * size
            _write(a, a.k + token * a.k_stride * size, page, write_offsets[token], stored)
            _write(
                a,
                a.v + token * a.v_stride * size,
                page + a.page_values * size,
                write_offsets[token],
                stored,
            )
        count_up(pointer, DONE)


@njit(**PART)
def _write(a, token, page, offset, stored):
    x = carray(pointer_to(token, stored), (a.num_heads, a.width))
    out = carray(pointer_to(page, stored), (a.num_heads, a.page_size, a.width))
    for head in range(a.num_heads):
        for place in range(a.width):
            out[head, offset, place] = x[head, place]
