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

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit
from numba.extending import intrinsic
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
    pointer_to,
    record,
    take_seat,
    wide,
)
from engine.kernels.host.codegen.functions import exp, fma
from engine.kernels.host.codegen.strided_loops import (
    LANES,
    Lines,
    Routine,
    add_lower_product,
    add_product,
    clear,
    counted,
    floats,
    integers,
    scale,
    size_of,
    stride_by,
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
_LINE = CHUNK * 4  # bytes of one number for each token of a chunk
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)


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


def _state_step(groups: int, lanes: int, *, by_channel: bool) -> Routine:
    """Return f(state, target, row, count, k, q, v, out, gates) for groups * lanes columns.

    The state S is [count, dv], with rows `row` bytes apart; k and q are [count]; v and out are
    [groups * lanes]. gates has beta, then e^g; with `by_channel` one e^g for each row of S.
    """

    def write_step(builder, state, target, row, count, k, q, v, out, gates) -> None:
        lines = Lines(builder, lanes)
        each = range(groups)
        beta = lines.number(gates)
        decays = builder.add(gates, _I64(4))
        shared = None if by_channel else lines.number(decays)

        def number(address, index):
            return lines.number(builder.add(address, builder.mul(index, _I64(4))))

        def recall(i, sums):
            line = builder.add(state, builder.mul(row, i))
            key = number(k, i)
            if shared is None:
                key = builder.fmul(number(decays, i), key)
            return [lines.fma(lines.load(line, n), key, sums[n]) for n in each]

        found = counted(builder, count, [lines.zero() for _ in each], recall)
        if shared is not None:
            found = [builder.fmul(shared, value) for value in found]
        errors = [builder.fmul(beta, builder.fsub(lines.load(v, n), found[n])) for n in each]

        def write(i, sums):
            line = builder.add(state, builder.mul(row, i))
            goal = builder.add(target, builder.mul(row, i))
            key = number(k, i)
            query = number(q, i)
            decay = number(decays, i) if shared is None else shared
            new = [
                lines.fma(errors[n], key, builder.fmul(decay, lines.load(line, n))) for n in each
            ]
            for n in each:
                lines.store(new[n], goal, n)
            return [lines.fma(new[n], query, sums[n]) for n in each]

        for n, total in enumerate(counted(builder, count, [lines.zero() for _ in each], write)):
            lines.store(total, out, n)

    return Routine(f"state_step_{groups}_{lanes}_{by_channel}", 9, write_step)


def _whole_step(*, by_channel: bool) -> Routine:
    """Return f(state, ..., gates, width), a `_state_step` of `width` columns."""
    steps = [
        (groups * lanes, _state_step(groups, lanes, by_channel=by_channel))
        for groups, lanes in ((4, LANES), (1, LANES), (1, 1))
    ]

    def write_columns(builder, state, target, row, count, k, q, v, out, gates, width) -> None:
        column = _I64(0)
        for step_width, step in steps:

            def columns(place, step=step):
                source, goal, value, result = (
                    builder.add(address, builder.mul(place, _I64(4)))
                    for address in (state, target, v, out)
                )
                step.call(builder, source, goal, row, count, k, q, value, result, gates)

            column = stride_by(builder, column, width, step_width, columns)

    return Routine(f"whole_step_{by_channel}", 10, write_columns)


_STEP = _whole_step(by_channel=False)
_STEP_BY_CHANNEL = _whole_step(by_channel=True)


@intrinsic
def _advance(typing, state, target, row, count, k, q, v, out, gates, width):
    """Write the state after a token to `target`; the state before is at `state` [count, width].

    See `_state_step`.
    """
    return _STEP.typed()


@intrinsic
def _advance_by_channel(typing, state, target, row, count, k, q, v, out, gates, width):
    """Write the state after a token, with a decay for each row of the state."""
    return _STEP_BY_CHANNEL.typed()


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
            _read_token(a, token, head, k_at, q_at, v_at, stored)
            at = token * a.num_heads + head
            floats(gates_at)[0] = floats(a.beta)[at]
            _read_decays(a, at, gates_at + 4)
            out_at = a.out + at * a.value_dim * 4
            row_bytes = a.value_dim * 4
            if a.num_decays == 1:
                _advance(
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
                _advance_by_channel(
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
def _read_decays(a, place, out_at):
    """Compute e^g for a token and value head, the `place`-th of all."""
    logs = floats(a.g + place * a.num_decays * 4)
    decays = floats(out_at)
    for channel in range(a.num_decays):
        decays[channel] = exp(logs[channel])


@njit(**STRICT_PART)
def _read_token(a, token, head, k_at, q_at, v_at, stored):
    """Load a token's k and q at unit length, and its v, of one value head as fp32.

    q is also multiplied by dk^-0.5.
    """
    size = size_of(stored)
    shrunk = np.float32(1) / np.sqrt(np.float32(a.key_dim))
    shared = head // a.share * a.key_dim * size
    for turn in range(2):
        is_key = turn == 0
        x = pointer_to(
            (a.k + token * a.k_stride if is_key else a.q + token * a.q_stride) + shared, stored
        )
        _to_unit(
            x, floats(k_at if is_key else q_at), a.key_dim, np.float32(1) if is_key else shrunk
        )
    x = pointer_to(a.v + token * a.v_stride + head * a.value_dim * size, stored)
    v = floats(v_at)
    for channel in range(a.value_dim):
        v[channel] = wide(x[channel])


@njit(**STRICT_PART)
def _to_unit(x, out, width, scale):
    """Scale a vector to unit length, with eight sums of squares, each of every eighth number."""
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = np.float32(0)
    for channel in range(width):
        out[channel] = wide(x[channel])
    whole = width // 8 * 8
    for at in range(0, whole, 8):
        s0 = fma(out[at], out[at], s0)
        s1 = fma(out[at + 1], out[at + 1], s1)
        s2 = fma(out[at + 2], out[at + 2], s2)
        s3 = fma(out[at + 3], out[at + 3], s3)
        s4 = fma(out[at + 4], out[at + 4], s4)
        s5 = fma(out[at + 5], out[at + 5], s5)
        s6 = fma(out[at + 6], out[at + 6], s6)
        s7 = fma(out[at + 7], out[at + 7], s7)
    for at in range(whole, width):
        s0 = fma(out[at], out[at], s0)
    total = ((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7))
    factor = np.float32(1) / np.sqrt(total + np.float32(1e-6)) * scale
    for channel in range(width):
        out[channel] *= factor


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
            _chunk(a, first, min(CHUNK, starts[row + 1] - first), head, state, seat, stored)
        count_up(pointer, DONE)


@njit(**STRICT_PART)
def _chunk(a, first, count, head, state, seat, stored):
    """Process `count` tokens from `first` on and advance the state at `state`."""
    key_dim = a.key_dim
    value_dim = a.value_dim
    key_row = a.key_dim * 4
    value_row = a.value_dim * 4
    k_at = seat
    q_at = k_at + CHUNK * key_row
    u_at = q_at + CHUNK * key_row
    turned_at = u_at + CHUNK * value_row
    system_at = turned_at + key_dim * _LINE
    scores_at = system_at + CHUNK * _LINE
    left_at = scores_at + CHUNK * _LINE
    own = first * a.num_heads + head
    out_at = a.out + own * value_row
    out_row = a.num_heads * value_row
    for i in range(count):
        _read_token(
            a, first + i, head, k_at + i * key_row, q_at + i * key_row, u_at + i * value_row, stored
        )
    if a.num_decays == 1:
        _decay_by_head(a, own, count, k_at, q_at, turned_at, system_at, scores_at, left_at)
    else:
        _decay_by_channel(a, own, count, k_at, q_at, turned_at, system_at, scores_at, left_at)
    # V - e^G K S; then the result is multiplied by beta.
    beta = floats(a.beta + 4 * own)
    left = floats(left_at)
    add_product(k_at, key_row, 4, state, value_row, u_at, value_row, count, value_dim, key_dim)
    for i in range(count):
        scale(u_at + i * value_row, value_dim, beta[i * a.num_heads])
        clear(out_at + i * out_row, value_dim)
    add_lower_product(system_at, _LINE, u_at, value_row, u_at, value_row, count, value_dim, 0)
    add_product(q_at, key_row, 4, state, value_row, out_at, out_row, count, value_dim, key_dim)
    add_lower_product(scores_at, _LINE, u_at, value_row, out_at, out_row, count, value_dim, 1)

    for channel in range(key_dim):
        scale(state + channel * value_row, value_dim, left[channel])
    add_product(turned_at, _LINE, 4, u_at, value_row, state, value_row, key_dim, value_dim, count)


@njit(**STRICT_PART)
def _decay_by_head(a, own, count, k_at, q_at, turned_at, system_at, scores_at, left_at):
    """Compute the products of a chunk with one decay per head.

    k and q have unit length. The system is -beta e^(G_i - G_j) k_i k_j and the scores are e^(G_i -
    G_j) q_i k_j, for j <= i. Then k and q become -e^G k and e^G q, `turned` gets e^(G_last - G_j)
    k_j by channel, and `left` e^G_last for each channel.
    """
    key_dim = a.key_dim
    key_row = a.key_dim * 4
    decays_at = left_at + a.key_dim * 4
    k = floats(k_at)
    turned = floats(turned_at)
    left = floats(left_at)
    decays = floats(decays_at)
    for i in range(count):
        for channel in range(key_dim):
            turned[channel * CHUNK + i] = k[i * key_dim + channel]
    before = floats(decays_at + CHUNK * _LINE)
    after = floats(decays_at + (CHUNK + 1) * _LINE)
    _find_decays(a, own, count, decays, before, after)
    for which in range(2):
        rows_at, products_at = (k_at, system_at) if which == 0 else (q_at, scores_at)
        _lower_scores(rows_at, key_row, turned_at, products_at, count, key_dim)
    beta = floats(a.beta + 4 * own)
    system = floats(system_at)
    scores = floats(scores_at)
    for i in range(count):
        strength = -beta[i * a.num_heads]
        for j in range(i + 1):
            system[i * CHUNK + j] *= strength * decays[i * CHUNK + j]
            scores[i * CHUNK + j] *= decays[i * CHUNK + j]
        scale(q_at + i * key_row, key_dim, before[i])
        scale(k_at + i * key_row, key_dim, -before[i])
    for channel in range(key_dim):
        left[channel] = before[count - 1]
        for i in range(count):
            turned[channel * CHUNK + i] *= after[i]


@njit(**STRICT_PART)
def _decay_by_channel(a, own, count, k_at, q_at, turned_at, system_at, scores_at, left_at):
    """Compute the same with a decay per channel: each token in turn decays the keys before it."""
    key_dim = a.key_dim
    decays_at = left_at + a.key_dim * 4
    left = floats(left_at)
    decays = floats(decays_at)
    beta = floats(a.beta + 4 * own)
    for channel in range(key_dim):
        left[channel] = 1
    for i in range(count):
        k_row = k_at + i * key_dim * 4
        q_row = q_at + i * key_dim * 4
        _read_decays(a, own + i * a.num_heads, decays_at)
        for first in range(0, i + 1, LANES):
            at = (i * CHUNK + first) * 4
            _fade(
                turned_at + first * 4,
                key_dim,
                i - first,
                decays_at,
                k_row,
                q_row,
                system_at + at,
                scores_at + at,
            )
        scale(system_at + i * _LINE, i, -beta[i * a.num_heads])
        k = floats(k_row)
        q = floats(q_row)
        for channel in range(key_dim):
            left[channel] *= decays[channel]
            q[channel] *= left[channel]
            k[channel] *= -left[channel]


def _write_fading(builder, faded, count, own, decays, k, q, system, scores) -> None:
    lines = Lines(builder, LANES)
    places = ir.VectorType(_I64, LANES)
    first = builder.insert_element(ir.Constant(places, ir.Undefined), own, _I32(0))
    everywhere = builder.shuffle_vector(
        first, first, ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
    )
    is_own = builder.icmp_signed("==", everywhere, ir.Constant(places, list(range(LANES))))

    def step(channel, sums):
        line = builder.add(faded, builder.mul(channel, _I64(_LINE)))
        offset = builder.mul(channel, _I64(4))
        decay, key, query = (
            lines.number(builder.add(address, offset)) for address in (decays, k, q)
        )
        keys = builder.select(is_own, key, builder.fmul(decay, lines.load(line)))
        lines.store(keys, line)
        return [
            lines.fma(keys, factor, total) for factor, total in zip((key, query), sums, strict=True)
        ]

    for total, out in zip(
        counted(builder, count, [lines.zero()] * 2, step), (system, scores), strict=True
    ):
        lines.store(total, out)


_FADE = Routine("fade", 8, _write_fading)


@intrinsic
def _fade(typing, faded, count, own, decays, k, q, system, scores):
    """Decay 16 earlier keys by a token's `decays`, or add the token as the `own`-th key.

    `faded` has a line for each channel; k and q are [count]. The products of the keys with the
    token's k and q are written to `system` and `scores` [16].
    """
    return _FADE.typed()


@njit(**STRICT_PART)
def _find_decays(a, own, count, decays, before, after):
    """Compute e^(G_i - G_j), and after these 64 x 64 numbers e^G_i and e^(G_last - G_i).

    The numbers with j > i are meaningless.
    """
    g = floats(a.g + 4 * own)
    running = np.float32(0)
    for i in range(count):
        running += g[i * a.num_heads]
        before[i] = running
    for i in range(count):
        after[i] = running - before[i]
        for j in range(CHUNK):
            decays[i * CHUNK + j] = before[i] - before[j] if j <= i else np.float32(0)
    for place in range(count * CHUNK):
        decays[place] = exp(decays[place])
    for i in range(2 * CHUNK):  # `after` follows `before` in memory
        before[i] = exp(before[i])


@njit(**STRICT_PART)
def _lower_scores(rows_at, row, turned_at, out_at, count, key_dim):
    """Compute the products of `count` tokens with the tokens up to each, and some later ones."""
    for first in range(0, count, LANES):
        num_rows = min(LANES, count - first)
        width = first + LANES
        at = out_at + first * _LINE
        clear(at, num_rows * CHUNK)
        add_product(
            rows_at + first * row, row, 4, turned_at, _LINE, at, _LINE, num_rows, width, key_dim
        )
