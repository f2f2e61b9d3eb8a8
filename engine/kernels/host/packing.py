"""Weights as the products of the host read them: 16 rows' values side by side, so that one load is 16 columns of y."""

from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from numba import carray, njit
from torch import Tensor

from engine.kernels.host.compiled import (
    DONE,
    NEXT,
    PART,
    compile_kernel,
    count_up,
    launch,
    pointer_to,
    record,
)
from engine.kernels.host.dot import LANES
from engine.kernels.host.team import Team

_ARGUMENTS = record("num_blocks", "num_rows", "num_words", "matrix_words", "row_words", "weight", "out")
_WORD_BYTES = 4


def num_steps(num_terms: int, dtype: torch.dtype) -> int:
    """The steps of a sum over so many terms: pairs of bf16, or terms of fp32."""
    return -(-num_terms * dtype.itemsize // _WORD_BYTES)


def pack(weight: Tensor, team: Team) -> Tensor:
    """weight [H, N, K], bf16 or fp32, on the host. Returns [H, ceil(N/16), ceil(K/2), 16, 2] bf16 or
    [H, ceil(N/16), K, 16] fp32, in which what the weight does not fill is 0."""
    num_matrices, num_rows, num_terms = weight.shape
    steps = num_steps(num_terms, weight.dtype)
    odd = steps * _WORD_BYTES != num_terms * weight.dtype.itemsize
    source = F.pad(weight, (0, 1)) if odd else weight
    strides = [stride * source.element_size() for stride in source.stride()]
    if strides[2] != source.element_size() or strides[0] % _WORD_BYTES or strides[1] % _WORD_BYTES:
        source = source.contiguous()
        strides = [stride * source.element_size() for stride in source.stride()]
    num_blocks = -(-num_rows // LANES)
    shape = (num_matrices, num_blocks, steps, LANES)
    out = torch.empty((*shape, 2) if weight.dtype is torch.bfloat16 else shape, dtype=weight.dtype)
    arguments = np.zeros(1, _ARGUMENTS)
    a = arguments[0]
    a["num_items"], a["num_blocks"] = num_matrices * num_blocks, num_blocks
    a["num_rows"], a["num_words"] = num_rows, steps
    a["matrix_words"], a["row_words"] = strides[0] // _WORD_BYTES, strides[1] // _WORD_BYTES
    a["weight"], a["out"] = source.data_ptr(), out.data_ptr()
    if out.numel():
        launch(_compiled(), arguments, team)
    return out


@cache
def _compiled():
    def work(pointer):
        _take_blocks(pointer)

    return compile_kernel(work, _ARGUMENTS, "pack", __file__)


@njit(**PART)
def _take_blocks(pointer):
    """One thread's part: 16 rows at a time, until none are left."""
    a = carray(pointer, 1)[0]
    weight = pointer_to(a.weight, np.uint32)
    out = carray(pointer_to(a.out, np.uint32), (a.num_items, a.num_words, LANES))
    while True:
        item = count_up(pointer, NEXT)
        if item >= a.num_items:
            return
        row = item % a.num_blocks * LANES
        first = item // a.num_blocks * a.matrix_words + row * a.row_words
        count = min(LANES, a.num_rows - row)
        for word in range(a.num_words):
            for lane in range(count):
                out[item, word, lane] = weight[first + lane * a.row_words + word]
            for lane in range(count, LANES):
                out[item, word, lane] = 0
        count_up(pointer, DONE)
