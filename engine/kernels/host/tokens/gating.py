"""The gated product of feed-forwards whose gate and up are computed apart."""

from functools import cache

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
    record,
)
from engine.kernels.host.codegen.row_vectors import gate_row
from engine.kernels.host.tokens.row_ops import rows_for_product

_GATINGS = record(
    "num_rows", "width", "gate_stride", "up_stride", "out_stride", "gate", "up", "out"
)
_ITEM_ROWS = 16


def gate_rows(gate: Tensor, up: Tensor, team: Team) -> Tensor:
    """Compute silu(gate) * up in fp32 and round once.

    Both are [T, K] with dense rows and of one dtype, bf16 or fp32. The result is the input of a
    product (`rows_for_product`).
    """
    num_rows, width = gate.shape
    out = rows_for_product(num_rows, width, gate.dtype)
    strides = (each.stride(0) * each.itemsize for each in (gate, up, out))
    launch_integers(
        gatings_for(gate.dtype),
        -(-num_rows // _ITEM_ROWS),
        (num_rows, width, *strides, gate.data_ptr(), up.data_ptr(), out.data_ptr()),
        team,
    )
    return out


@cache
def gatings_for(dtype: torch.dtype):
    stored = STORED_AS[dtype]

    def work(pointer):
        _gate_rows(pointer, stored)

    return compile_kernel(work, _GATINGS, f"gate_rows_{stored.__name__}")


@njit(**PART)
def _gate_rows(pointer, stored):
    a = carray(pointer, 1)[0]
    while True:
        item = count_up(pointer, NEXT)
        if item >= a.num_items:
            return
        first = item * _ITEM_ROWS
        for row in range(first, min(first + _ITEM_ROWS, a.num_rows)):
            gate_row(
                a.gate + row * a.gate_stride,
                a.up + row * a.up_stride,
                a.out + row * a.out_stride,
                a.width,
                stored,
            )
        count_up(pointer, DONE)
