"""Depthwise causal convolution and SiLU on the host.

The last inputs of each row are kept in its slot. A result is an fp32 sum of one product per tap,
the oldest input first, each product rounded. An output's bits depend on its own inputs and on
nothing else, in decoding or in a chunk of any length.
"""

from functools import cache

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from engine.kernels.host.codegen.compiled import (
    DONE,
    NEXT,
    STORED_AS,
    STRICT,
    STRICT_PART,
    Team,
    compile_kernel,
    count_up,
    launch,
    launch_integers,
    pointer_to,
    record,
    rounded,
    take_seat,
    wide,
)
from engine.kernels.host.codegen.functions import silu
from engine.kernels.host.codegen.strided_loops import clear, floats, integers, size_of
from engine.kernels.recurrent_rows import RecurrentRows

_ARGUMENTS = record(
    "num_rows",
    "channels",
    "kernel",
    "stride",
    "x",
    "taps",
    "pool",
    "out",
    "starts",
    "slots",
    "is_new",
)
_TREES = record(
    "num_nodes",
    "channels",
    "kernel",
    "stride",
    "x",
    "taps",
    "pool",
    "out",
    "starts",
    "slots",
    "is_new",
    "histories",
    "targets",
    "kept",
    "num_old",
)
_BLOCK = 256  # channels of an item


def causal_conv(x: Tensor, taps: Tensor, pool: Tensor, rows: RecurrentRows, team: Team) -> Tensor:
    """Convolve x [T, C], store the rows' last inputs in their slots and return [T, C].

    Channels of x are contiguous. taps is [K, C] fp32, the oldest input's first; pool is [num_slots,
    K - 1, C]. x, pool and the result have one dtype, bf16 or fp32.
    """
    out = torch.empty(x.shape, dtype=x.dtype)
    kernel, channels = taps.shape
    launch(
        compiled_for(x.dtype),
        _ARGUMENTS,
        team,
        num_items=len(rows.slots) * -(-channels // _BLOCK),
        scratch_bytes=kernel * _BLOCK * 4,
        num_rows=len(rows.slots),
        kernel=kernel,
        channels=channels,
        stride=x.stride(0) * x.itemsize,
        x=x,
        taps=taps,
        pool=pool,
        out=out,
        starts=rows.starts,
        slots=rows.slots,
        is_new=rows.is_new,
    )
    return out


@cache
def compiled_for(dtype: torch.dtype):
    stored = STORED_AS[dtype]

    def work(pointer):
        _take_channels(pointer, stored)

    return compile_kernel(work, _ARGUMENTS, f"causal_conv_{stored.__name__}", numbers=STRICT)


def causal_conv_of_trees(
    x: Tensor,
    taps: Tensor,
    pool: Tensor,
    rows: RecurrentRows,
    histories: Tensor,
    targets: Tensor,
    kept: Tensor,
    team: Team,
) -> Tensor:
    """Convolve T nodes of trees, each with its own preceding inputs.

    histories [T, K - 1] int64 are the places of these in [R * (K - 1) old ones, T new ones]; the
    old ones are in the rows' slots. kept is [N, K - 1, C] of the pool's dtype; its record
    targets[t] ([T] int64) gets the last inputs of node t.
    """
    out = torch.empty(x.shape, dtype=x.dtype)
    kernel, channels = taps.shape
    launch_integers(
        trees_for(x.dtype),
        len(x) * -(-channels // _BLOCK),
        (
            len(x),
            channels,
            kernel,
            x.stride(0) * x.itemsize,
            x.data_ptr(),
            taps.data_ptr(),
            pool.data_ptr(),
            out.data_ptr(),
            rows.starts.data_ptr(),
            rows.slots.data_ptr(),
            rows.is_new.data_ptr(),
            histories.data_ptr(),
            targets.data_ptr(),
            kept.data_ptr(),
            len(rows.slots) * (kernel - 1),
        ),
        team,
        scratch_bytes=kernel * _BLOCK * 4,
    )
    return out


@cache
def trees_for(dtype: torch.dtype):
    stored = STORED_AS[dtype]

    def work(pointer):
        _take_nodes(pointer, stored)

    return compile_kernel(work, _TREES, f"causal_conv_trees_{stored.__name__}", numbers=STRICT)


@njit(**STRICT_PART)
def _take_nodes(pointer, stored):
    """Run one thread: process some channels of a node at a time until no items are left."""
    a = carray(pointer, 1)[0]
    targets = integers(a.targets)
    total_at = take_seat(pointer)
    size = size_of(stored)
    num_blocks = (a.channels + _BLOCK - 1) // _BLOCK
    old_at = total_at + _BLOCK * 4
    while True:
        item = count_up(pointer, NEXT)
        if item >= a.num_items:
            return
        node = item // num_blocks
        first = item % num_blocks * _BLOCK
        width = min(_BLOCK, a.channels - first)
        for place in range(a.kernel - 1):
            _recall_input(a, node, place, first, width, old_at, stored)
        # Like a row whose only new token is the node.
        _convolve(a, node, node, first, width, old_at, total_at, stored)
        kept_at = a.kept + (targets[node] * (a.kernel - 1) * a.channels + first) * size
        _keep(a, kept_at, old_at, node, node + 1, first, width, stored)
        count_up(pointer, DONE)


@njit(**STRICT_PART)
def _recall_input(a, node, place, first, width, old_at, stored):
    """Load an input before a node as fp32; 0 if its row is new, whatever the slot holds."""
    slots = integers(a.slots)
    is_new = integers(a.is_new)
    size = size_of(stored)
    length = a.kernel - 1
    source = integers(a.histories)[node * length + place]
    old = floats(old_at + place * _BLOCK * 4)
    starts = False
    at = a.x + (source - a.num_old) * a.stride + first * size
    if source < a.num_old:
        row = source // length
        starts = is_new[row] != 0
        at = a.pool + ((slots[row] * length + source % length) * a.channels + first) * size
    x = pointer_to(at, stored)
    for channel in range(width):
        old[channel] = np.float32(0) if starts else wide(x[channel])


@njit(**STRICT_PART)
def _take_channels(pointer, stored):
    """Run one thread: process some channels of a row at a time until no items are left."""
    a = carray(pointer, 1)[0]
    starts = integers(a.starts)
    slots = integers(a.slots)
    is_new = integers(a.is_new)
    total_at = take_seat(pointer)
    size = size_of(stored)
    num_blocks = (a.channels + _BLOCK - 1) // _BLOCK
    old_at = total_at + _BLOCK * 4
    while True:
        item = count_up(pointer, NEXT)
        if item >= a.num_items:
            return
        row = item // num_blocks
        first = item % num_blocks * _BLOCK
        width = min(_BLOCK, a.channels - first)
        start = starts[row]
        end = starts[row + 1]
        if end > start:
            state_at = a.pool + (slots[row] * (a.kernel - 1) * a.channels + first) * size
            _recall(a, state_at, old_at, is_new[row], width, stored)
            for token in range(start, end):
                _convolve(a, token, start, first, width, old_at, total_at, stored)
            _keep(a, state_at, old_at, start, end, first, width, stored)
        count_up(pointer, DONE)


@njit(**STRICT_PART)
def _recall(a, state_at, old_at, is_new, width, stored):
    """Load the row's last earlier inputs as fp32; 0 if the row is new, whatever the slot holds."""
    for place in range(a.kernel - 1):
        state = pointer_to(state_at + place * a.channels * size_of(stored), stored)
        old = floats(old_at + place * _BLOCK * 4)
        for channel in range(width):
            old[channel] = np.float32(0) if is_new else wide(state[channel])


@njit(**STRICT_PART)
def _convolve(a, token, start, first, width, old_at, total_at, stored):
    """Convolve one token's channels first .. first + width - 1."""
    clear(total_at, width)
    for tap in range(a.kernel):
        source = token - (a.kernel - 1) + tap
        taps = floats(a.taps + (tap * a.channels + first) * 4)
        if source < start:
            _add(
                floats(old_at + (source - start + a.kernel - 1) * _BLOCK * 4),
                taps,
                floats(total_at),
                width,
            )
        else:
            x = pointer_to(a.x + source * a.stride + first * size_of(stored), stored)
            _add(x, taps, floats(total_at), width)
    out = pointer_to(a.out + (token * a.channels + first) * size_of(stored), stored)
    total = floats(total_at)
    for channel in range(width):
        out[channel] = rounded(silu(total[channel]), stored)


@njit(**STRICT_PART)
def _keep(a, state_at, old_at, start, end, first, width, stored):
    """Store the row's last inputs in its slot."""
    for place in range(a.kernel - 1):
        source = end - (a.kernel - 1) + place
        state = pointer_to(state_at + place * a.channels * size_of(stored), stored)
        if source < start:
            old = floats(old_at + (source - start + a.kernel - 1) * _BLOCK * 4)
            for channel in range(width):
                state[channel] = rounded(old[channel], stored)
        else:
            x = pointer_to(a.x + source * a.stride + first * size_of(stored), stored)
            for channel in range(width):
                state[channel] = x[channel]


@njit(**STRICT_PART)
def _add(x, taps, total, width):
    for channel in range(width):
        total[channel] += wide(x[channel]) * taps[channel]
