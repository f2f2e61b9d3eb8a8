"""Depthwise causal convolution and SiLU on the host, with the last inputs of each row kept in its slot.

Sums of kernel-many products in fp32, the oldest input first, each product rounded: an output's bits depend on its own
inputs and on nothing else, drawn or read in a chunk of any length.
"""

from functools import cache

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from engine.kernels.host import functions
from engine.kernels.host.compiled import (
    DONE,
    NEXT,
    STORED_AS,
    STRICT,
    STRICT_PART,
    compile_kernel,
    count_up,
    launch,
    pointer_to,
    record,
    rounded,
    wide,
)
from engine.kernels.host.functions import silu
from engine.kernels.host.team import Team
from engine.kernels.recurrent_rows import RecurrentRows

_ARGUMENTS = record("seats", "num_rows", "channels", "kernel", "stride", "num_slots", "x", "taps", "pool", "out",
                    "starts", "slots", "is_new", "scratch", "scratch_size")
_SEAT = 3  # the place of `seats` in the record
_BLOCK = 256  # channels of an item


def causal_conv(x: Tensor, taps: Tensor, pool: Tensor, rows: RecurrentRows, team: Team) -> Tensor:
    """x: [T, C], channels side by side; taps: [K, C] fp32, the oldest input's first; pool: [num_slots, K - 1, C], whose
    slots of the rows get the rows' last inputs. x and pool bf16 or fp32, of one type. Returns [T, C] of the same."""
    out = torch.empty(x.shape, dtype=x.dtype)
    arguments = np.zeros(1, _ARGUMENTS)
    a = arguments[0]
    a["num_rows"], a["kernel"], a["channels"] = len(rows.slots), *taps.shape
    a["num_items"] = a["num_rows"] * -(-x.shape[1] // _BLOCK)
    a["stride"], a["num_slots"] = x.stride(0), len(pool)
    a["x"], a["taps"], a["pool"], a["out"] = x.data_ptr(), taps.data_ptr(), pool.data_ptr(), out.data_ptr()
    a["starts"], a["slots"], a["is_new"] = rows.starts.data_ptr(), rows.slots.data_ptr(), rows.is_new.data_ptr()
    a["scratch_size"] = len(taps) * _BLOCK
    scratch = torch.empty(torch.get_num_threads(), len(taps) * _BLOCK)
    a["scratch"] = scratch.data_ptr()
    launch(_compiled_for(x.dtype), arguments, team)
    return out


@cache
def _compiled_for(dtype: torch.dtype):
    stored = STORED_AS[dtype]

    def work(pointer):
        _take_channels(pointer, stored)

    return compile_kernel(work, _ARGUMENTS, f"causal_conv_{stored.__name__}", __file__, functions.__file__,
                          numbers=STRICT)


@njit(**STRICT_PART)
def _take_channels(pointer, stored):
    """One thread's part: some channels of a row at a time, until none is left."""
    a = carray(pointer, 1)[0]
    starts = carray(pointer_to(a.starts, np.int64), a.num_rows + 1)
    x = carray(pointer_to(a.x, stored), (starts[a.num_rows] - 1) * a.stride + a.channels)
    out = carray(pointer_to(a.out, stored), (starts[a.num_rows], a.channels))
    pool = carray(pointer_to(a.pool, stored), (a.num_slots, a.kernel - 1, a.channels))
    taps = carray(pointer_to(a.taps, np.float32), (a.kernel, a.channels))
    slots = carray(pointer_to(a.slots, np.int64), a.num_rows)
    is_new = carray(pointer_to(a.is_new, np.int64), a.num_rows)
    seat = a.scratch + count_up(pointer, _SEAT) * a.scratch_size * 4
    total = carray(pointer_to(seat, np.float32), _BLOCK)
    history = carray(pointer_to(seat + _BLOCK * 4, np.float32), (a.kernel - 1, _BLOCK))
    num_blocks = (a.channels + _BLOCK - 1) // _BLOCK
    while True:
        item = count_up(pointer, NEXT)
        if item >= a.num_items:
            return
        row, first = item // num_blocks, item % num_blocks * _BLOCK
        width = min(_BLOCK, a.channels - first)
        state = pool[slots[row]]
        start, end = starts[row], starts[row + 1]
        if end > start:
            for place in range(a.kernel - 1):
                for channel in range(width):
                    old = wide(state[place, first + channel])
                    history[place, channel] = np.float32(0) if is_new[row] else old
            for token in range(start, end):
                _convolve(x, a.stride, first, token, start, history, taps, total, width, out, stored)
            for place in range(a.kernel - 1):
                token = end - (a.kernel - 1) + place
                for channel in range(width):
                    if token < start:
                        state[place, first + channel] = rounded(history[token - start + a.kernel - 1, channel], stored)
                    else:
                        state[place, first + channel] = x[token * a.stride + first + channel]
        count_up(pointer, DONE)


@njit(**STRICT_PART)
def _convolve(x, stride, first, token, start, history, taps, total, width, out, stored):
    """One token's channels first .. first + width - 1."""
    for channel in range(width):
        total[channel] = 0
    kernel = len(taps)
    for tap in range(kernel):
        source = token - (kernel - 1) + tap
        if source < start:
            for channel in range(width):
                total[channel] += history[source - start + kernel - 1, channel] * taps[tap, first + channel]
        else:
            for channel in range(width):
                total[channel] += wide(x[source * stride + first + channel]) * taps[tap, first + channel]
    for channel in range(width):
        out[token, first + channel] = rounded(silu(total[channel]), stored)
