"""One token of the delta rule: its inputs, and the step of the state."""

import numpy as np
from llvmlite import ir
from numba import njit
from numba.extending import intrinsic

from engine.kernels.host.codegen.compiled import STRICT_PART, pointer_to, wide
from engine.kernels.host.codegen.functions import exp, fma
from engine.kernels.host.codegen.strided_loops import (
    LANES,
    Lines,
    Routine,
    counted,
    floats,
    size_of,
    stride_by,
)

_I64 = ir.IntType(64)


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
def advance(typing, state, target, row, count, k, q, v, out, gates, width):
    """Write the state after a token to `target`; the state before is at `state` [count, width].

    See `_state_step`.
    """
    return _STEP.typed()


@intrinsic
def advance_by_channel(typing, state, target, row, count, k, q, v, out, gates, width):
    """Write the state after a token, with a decay for each row of the state."""
    return _STEP_BY_CHANNEL.typed()


@njit(**STRICT_PART)
def read_decays(a, place, out_at):
    """Compute e^g for a token and value head, the `place`-th of all."""
    logs = floats(a.g + place * a.num_decays * 4)
    decays = floats(out_at)
    for channel in range(a.num_decays):
        decays[channel] = exp(logs[channel])


@njit(**STRICT_PART)
def read_token(a, token, head, k_at, q_at, v_at, stored):
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
