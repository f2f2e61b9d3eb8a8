"""The chunked form of the delta rule for one chunk of tokens."""

import numpy as np
from llvmlite import ir
from numba import njit
from numba.extending import intrinsic

from engine.kernels.delta_rule import CHUNK
from engine.kernels.host.codegen.compiled import STRICT_PART
from engine.kernels.host.codegen.functions import exp
from engine.kernels.host.codegen.strided_loops import (
    LANES,
    Lines,
    Routine,
    add_lower_product,
    add_product,
    clear,
    counted,
    floats,
    scale,
)
from engine.kernels.host.recurrent.delta_token import read_decays, read_token

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_LINE = CHUNK * 4  # bytes of one number for each token of a chunk


@njit(**STRICT_PART)
def run_chunk(a, first, count, head, state, seat, stored):
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
        read_token(
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
        read_decays(a, own + i * a.num_heads, decays_at)
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
