"""Both forms of the gated delta rule on the host, with states in place.

States are fp32 [num_records, Hv, dk, dv].

The formulas are those of `engine/backends/gated_delta.py`, for each value head separately. All sums
are in the order of tokens or of channels, so an output's bits depend on its own row's tokens up to
it. In the one-step form these are the previous state and the token. In the chunked form they are
the chunks on the 64-token grid from the row's start.

A decay per key channel cannot be factored out of the sum over channels, and e^G_i times e^-G_j
overflows. So the chunked form keeps every earlier key of the chunk in its decayed form: each token
multiplies all of them by its own decay.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch
from numba import carray, njit
from torch import Tensor

from engine.kernels.delta_rule import CHUNK
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
    record,
    take_seat,
)
from engine.kernels.host.codegen.strided_loops import clear, floats, integers
from engine.kernels.host.recurrent.delta_chunk import run_chunk
from engine.kernels.host.recurrent.delta_token import (
    advance,
    advance_by_channel,
    read_decays,
    read_token,
)
from engine.kernels.recurrent_rows import RecurrentRows, StateSteps

_ARGUMENTS = record(
    "num_rows",
    "num_heads",
    "share",
    "key_dim",
    "value_dim",
    "q",
    "q_stride",
    "k",
    "k_stride",
    "v",
    "v_stride",
    "g",
    "num_decays",
    "beta",
    "starts",
    "slots",
    "is_new",
    "parents",
    "targets",
    "pool",
    "kept",
    "out",
)


@dataclass(frozen=True)
class DeltaInputs:
    """Inputs of T tokens.

    q and k are [T, Hk, dk] and v is [T, Hv, dv], of one dtype, bf16 or fp32, dense within a token.
    g is [T, Hv], or [T, Hv, dk] for a decay per key channel; beta is [T, Hv]; both are fp32 and
    contiguous. q and k are the outputs of the convolution.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def delta_steps(
    inputs: DeltaInputs,
    rows: RecurrentRows,
    steps: StateSteps,
    pool: Tensor,
    kept: Tensor,
    team: Team,
) -> Tensor:
    """Run the one-step form and return [T, Hv, dv] fp32.

    Rows' states are in `pool`. The states after each token are written to `kept`, which may be the
    pool.
    """
    key_dim, value_dim = pool.shape[2:]
    return _run(
        steps_for(inputs.v.dtype),
        inputs,
        rows,
        pool,
        team,
        scratch_floats=3 * key_dim + value_dim + 1,
        parents=steps.parents,
        targets=steps.targets,
        kept=kept,
    )


def delta_chunks(inputs: DeltaInputs, rows: RecurrentRows, pool: Tensor, team: Team) -> Tensor:
    """Run the chunked form over rows that start on the 64-token grid and return [T, Hv, dv] fp32.

    States in `pool` advance to the rows' ends.
    """
    key_dim, value_dim = pool.shape[2:]
    return _run(
        chunks_for(inputs.v.dtype),
        inputs,
        rows,
        pool,
        team,
        scratch_floats=CHUNK * (3 * key_dim + value_dim + 3 * CHUNK + 2) + 2 * key_dim,
    )


def _run(
    kernel,
    inputs: DeltaInputs,
    rows: RecurrentRows,
    pool: Tensor,
    team: Team,
    *,
    scratch_floats: int,
    **others: Tensor,
) -> Tensor:
    """Launch with the arguments of both forms and `others`; return the output."""
    out = torch.empty(inputs.v.shape, dtype=torch.float32)
    q = inputs.q
    k = inputs.k
    v = inputs.v
    _, num_heads, key_dim, value_dim = pool.shape
    launch(
        kernel,
        _ARGUMENTS,
        team,
        num_items=len(rows.slots) * num_heads,
        scratch_bytes=4 * scratch_floats,
        num_rows=len(rows.slots),
        num_heads=num_heads,
        share=v.shape[1] // q.shape[1],
        key_dim=key_dim,
        value_dim=value_dim,
        q=q,
        k=k,
        v=v,
        q_stride=q.stride(0) * q.itemsize,
        k_stride=k.stride(0) * k.itemsize,
        v_stride=v.stride(0) * v.itemsize,
        g=inputs.g,
        num_decays=math.prod(inputs.g.shape[2:]),
        beta=inputs.beta,
        pool=pool,
        starts=rows.starts,
        slots=rows.slots,
        is_new=rows.is_new,
        out=out,
        **others,
    )
    return out


@cache
def steps_for(dtype: torch.dtype):
    stored = STORED_AS[dtype]

    def work(pointer):
        _take_steps(pointer, stored)

    return compile_kernel(work, _ARGUMENTS, f"delta_steps_{stored.__name__}", numbers=STRICT)


@cache
def chunks_for(dtype: torch.dtype):
    stored = STORED_AS[dtype]

    def work(pointer):
        _take_chunks(pointer, stored)

    return compile_kernel(work, _ARGUMENTS, f"delta_chunks_{stored.__name__}", numbers=STRICT)


@njit(**STRICT_PART)
def _take_steps(pointer, stored):
    """Run one thread: process the tokens of a row's value head in order until no items are left."""
    a = carray(pointer, 1)[0]
    starts = integers(a.starts)
    slots = integers(a.slots)
    is_new = integers(a.is_new)
    parents = integers(a.parents)
    targets = integers(a.targets)
    k_at = take_seat(pointer)
    q_at = k_at + a.key_dim * 4
    v_at = q_at + a.key_dim * 4
    gates_at = v_at + a.value_dim * 4
    head_bytes = a.key_dim * a.value_dim * 4
    while True:
        item = count_up(pointer, NEXT)
        if item >= a.num_items:
            return
        row = item // a.num_heads
        head = item % a.num_heads
        for token in range(starts[row], starts[row + 1]):
            target = a.kept + (targets[token] * a.num_heads + head) * head_bytes
            source = target
            if parents[token] >= 0:
                source = a.kept + (targets[parents[token]] * a.num_heads + head) * head_bytes
            elif is_new[row]:
                clear(target, a.key_dim * a.value_dim)
            else:
                source = a.pool + (slots[row] * a.num_heads + head) * head_bytes
            read_token(a, token, head, k_at, q_at, v_at, stored)
            at = token * a.num_heads + head
            floats(gates_at)[0] = floats(a.beta)[at]
            read_decays(a, at, gates_at + 4)
            out_at = a.out + at * a.value_dim * 4
            row_bytes = a.value_dim * 4
            if a.num_decays == 1:
                advance(
                    source,
                    target,
                    row_bytes,
                    a.key_dim,
                    k_at,
                    q_at,
                    v_at,
                    out_at,
                    gates_at,
                    a.value_dim,
                )
            else:
                advance_by_channel(
                    source,
                    target,
                    row_bytes,
                    a.key_dim,
                    k_at,
                    q_at,
                    v_at,
                    out_at,
                    gates_at,
                    a.value_dim,
                )
        count_up(pointer, DONE)


@njit(**STRICT_PART)
def _take_chunks(pointer, stored):
    """Run one thread: process the chunks of a row's value head in order until no items are left."""
    a = carray(pointer, 1)[0]
    starts = integers(a.starts)
    slots = integers(a.slots)
    is_new = integers(a.is_new)
    seat = take_seat(pointer)
    while True:
        item = count_up(pointer, NEXT)
        if item >= a.num_items:
            return
        row = item // a.num_heads
        head = item % a.num_heads
        state = a.pool + (slots[row] * a.num_heads + head) * a.key_dim * a.value_dim * 4
        if is_new[row] and starts[row] < starts[row + 1]:
            clear(state, a.key_dim * a.value_dim)
        for first in range(starts[row], starts[row + 1], CHUNK):
            run_chunk(a, first, min(CHUNK, starts[row + 1] - first), head, state, seat, stored)
        count_up(pointer, DONE)
