"""The online softmax between the two products of attention.

It is written in LLVM vectors of 16 lanes, so that every element has the same operations,
whatever its neighbors. Kernels that contain them are compiled with STRICT numbers (`compiled.py`),
otherwise LLVM may simplify the exponential away.
"""

from functools import cache

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.host.codegen.lane_shuffles import lane_indices, pointer_at
from engine.kernels.host.codegen.vectors import (
    BFLOAT,
    LANES,
    cpu_features,
    has_pair_products,
    in_all_lanes,
)

BLOCK_KEYS = 64  # keys of one step of the online softmax, on a grid of absolute positions
VECTOR_BYTES = 64
# bytes of a row, see `soften_for`
SCORE_ROW = 4 * BLOCK_KEYS
STATE_BYTES = 2 * VECTOR_BYTES

_I8 = ir.IntType(8)
_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_F32 = ir.FloatType()
_FLOATS = ir.VectorType(_F32, LANES)
_INTEGERS = ir.VectorType(_I32, LANES)

# 2^r = 1 + r * (c0 + c1 r + ...) for r in [-1/2, 1/2]: interpolated at Chebyshev points, relative
# error 5e-9.
_EXP2 = (
    0.6931471880262288,
    0.24022650760568237,
    0.05550357114219167,
    0.009618082557265605,
    0.0013390863364649932,
    0.00015453162949152332,
)
# The same for r in [0, 1), relative error 8e-6, 1/260 of the possible error of rounding to bf16.
_EXP2_TO_BF16 = (0.6931339926201513, 0.240647048121149, 0.05344102927073067, 0.012763113885720448)
# 1.5 * 2^23: x + this has x, rounded to the nearest integer, in its lowest bits.
_MAGIC = 12582912.0
_LOWEST = -120.0  # 2^x counts as 0 below this


@cache
def soften_for(rows: int, *, rounds: bool):
    """Return a step of the online softmax of `rows` rows for compiled code.

    It is f(scores, weights, states, num_seen, unit, sums, sum_row, sum_vectors). The rows are
    independent; while one waits for its maximum score, others are computed. The arguments are the
    addresses of the first row's data, and the rows' data are consecutive:
        scores: [BLOCK_KEYS] fp32. Scores from the row's `num_seen` (int64) on count as minus
            infinity, whatever they hold. With the address 0 all rows see all keys.
        weights: the results exp(unit * ln 2 * (score - maximum so far)), [BLOCK_KEYS] fp32, or bf16
            with `rounds`.
        states: STATE_BYTES, fp32: 16 partial sums of all weights so far, and the maximum score so
            far.
        sums: the row's accumulated output, `sum_vectors` vectors, `sum_row` bytes apart.
    If a score exceeds all earlier ones, outputs and partial sums are rescaled. A block without
    visible keys changes no bit: its weights are 0.

    Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
    """

    @intrinsic
    def soften(typing, scores, weights, states, num_seen, unit, sums, sum_row, sum_vectors):
        def generate(context, builder, signature, arguments):
            _Softmax(builder, rows, *arguments).write(rounds=rounds)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4, types.float32, *[types.int64] * 3), generate

    return soften


class _Softmax:
    """A generator of one `soften_for` at the builder's position."""

    def __init__(
        self, builder, rows, scores, weights, states, num_seen, unit, sums, sum_row, sum_vectors
    ) -> None:
        self._b, self._rows = builder, range(rows)
        self._scores = scores
        self._weights = weights
        self._num_seen = num_seen
        self._states = [builder.add(states, _I64(row * STATE_BYTES)) for row in self._rows]
        self._sums = [builder.add(sums, builder.mul(sum_row, _I64(row))) for row in self._rows]
        self._sum_vectors, self._unit = sum_vectors, in_all_lanes(builder, unit)

    def write(self, *, rounds) -> None:
        b = self._b
        found = self._found()
        before = [
            in_all_lanes(b, b.load(pointer_at(b, state, _F32, VECTOR_BYTES), align=4))
            for state in self._states
        ]
        highest = _highest(b, found, before)
        self._rescale(before, highest)
        for row in self._rows:
            weights = b.add(self._weights, _I64(row * BLOCK_KEYS * (2 if rounds else 4)))
            _weigh(
                b,
                found[row],
                weights,
                self._states[row],
                b.fmul(highest[row], self._unit),
                self._unit,
                rounds,
            )

    def _found(self):
        """Return each row's scores, with minus infinity for keys that it does not see."""
        b = self._b
        (all_seen, some_hidden) = (self._b.append_basic_block(name) for name in ("all", "some"))
        places = range(BLOCK_KEYS // LANES)
        found = [
            [
                b.load(
                    pointer_at(b, self._scores, _FLOATS, row * SCORE_ROW + VECTOR_BYTES * place),
                    align=4,
                )
                for place in places
            ]
            for row in self._rows
        ]
        entry = b.block
        b.cbranch(b.icmp_signed("==", self._num_seen, _I64(0)), all_seen, some_hidden)
        b.position_at_end(some_hidden)
        counts = [
            b.load(pointer_at(b, self._num_seen, _I64, 8 * row), align=8) for row in self._rows
        ]
        left = [
            [_seen(b, found[row][place], counts[row], LANES * place) for place in places]
            for row in self._rows
        ]
        b.branch(all_seen)
        b.position_at_end(all_seen)
        return [
            [
                _either(b, found[row][place], entry, left[row][place], some_hidden)
                for place in places
            ]
            for row in self._rows
        ]

    def _rescale(self, before, highest) -> None:
        """Rescale the rows with a new maximum score."""
        b = self._b
        lane = _I32(0)
        is_higher = [
            b.fcmp_ordered(
                ">", *(b.extract_element(vectors[row], lane) for vectors in (highest, before))
            )
            for row in self._rows
        ]
        any_higher = is_higher[0]
        for other in is_higher[1:]:
            any_higher = b.or_(any_higher, other)
        some = b.append_basic_block("higher")
        done = b.append_basic_block("on_scale")
        b.cbranch(any_higher, some, done)
        b.position_at_end(some)
        lows, highs = (
            b.fmul(_side_by_side(b, vectors), self._unit) for vectors in (before, highest)
        )
        factors = _exp2(b, b.fsub(lows, highs))
        for row in self._rows:
            scaled = b.append_basic_block(f"scale_{row}")
            after = b.append_basic_block(f"scaled_{row}")
            b.cbranch(is_higher[row], scaled, after)
            b.position_at_end(scaled)
            factor = in_all_lanes(b, b.extract_element(factors, _I32(row)))
            for address, count in (
                (self._states[row], _I64(1)),
                (self._sums[row], self._sum_vectors),
            ):
                with cgutils.for_range(b, count) as loop:
                    at = b.inttoptr(
                        b.add(address, b.mul(loop.index, _I64(VECTOR_BYTES))), _FLOATS.as_pointer()
                    )
                    b.store(b.fmul(b.load(at, align=4), factor), at, align=4)
            b.store(
                b.extract_element(highest[row], lane),
                pointer_at(b, self._states[row], _F32, VECTOR_BYTES),
                align=4,
            )
            b.branch(after)
            b.position_at_end(after)
        b.branch(done)
        b.position_at_end(done)


def _weigh(b, found, weights, state, origin, unit, rounds):
    """Write the steps that follow once a row's maximum score is known.

    `origin` is that maximum in units of the exponential.
    """
    # One rounding: scores far from 0 keep their differences. All of a row's weights share the error
    # of the origin.
    exp2 = exp2_to_bf16 if rounds else _exp2
    parts = [exp2(b, _fma(b, score, unit, b.fneg(origin))) for score in found]
    for place, part in enumerate(parts):
        if rounds:
            shorts = to_bf16(b, part)
            b.store(shorts, pointer_at(b, weights, shorts.type, VECTOR_BYTES // 2 * place), align=2)
        else:
            b.store(part, pointer_at(b, weights, _FLOATS, VECTOR_BYTES * place), align=4)
    while len(parts) > 1:
        parts = [b.fadd(*parts[i : i + 2]) for i in range(0, len(parts), 2)]
    sums = pointer_at(b, state, _FLOATS, 0)
    b.store(b.fadd(b.load(sums, align=4), parts[0]), sums, align=4)


def _either(b, value, block, other, other_block):
    phi = b.phi(value.type)
    phi.add_incoming(value, block)
    phi.add_incoming(other, other_block)
    return phi


def _side_by_side(b, vectors):
    """Return a vector with lane i of vector i."""
    joined = vectors[0]
    for place, vector in enumerate(vectors[1:], start=1):
        joined = b.shuffle_vector(
            joined, vector, lane_indices(lane + LANES * (lane == place) for lane in range(LANES))
        )
    return joined


def _seen(b, scores, num_seen, first):
    """Replace the scores from `num_seen` on by minus infinity; `first` is the first one's index."""
    count = in_all_lanes(b, b.trunc(b.sub(num_seen, _I64(first)), _I32))
    hidden = b.icmp_signed(">=", ir.Constant(_INTEGERS, list(range(LANES))), count)
    return b.select(hidden, constant(float("-inf")), scores)


def _highest(b, rows, others):
    """Return each row's maximum over its vectors and its other value, in all lanes.

    NaN shows in the weights.
    """
    for vectors in zip(*rows, strict=True):
        others = [_larger(b, vector, other) for vector, other in zip(vectors, others, strict=True)]
    for distance in (8, 4, 2, 1):
        places = lane_indices(lane ^ distance for lane in range(LANES))
        others = [_larger(b, b.shuffle_vector(other, other, places), other) for other in others]
    return others


def _larger(b, first, second):
    return b.select(b.fcmp_ordered(">", first, second), first, second)


def _exp2(b, x):
    shifted = b.fadd(x, constant(_MAGIC))
    value = _one_and_more(b, b.fsub(x, b.fsub(shifted, constant(_MAGIC))), _EXP2)
    return _times_power(b, value, b.bitcast(shifted, _INTEGERS), x)


def exp2_to_bf16(b, x):
    """Compute 2^x for results that are rounded to bf16.

    It takes half of the instructions if the CPU has AVX512-DQ. With these, small results underflow
    gradually instead of becoming 0. The difference vanishes in a sum that contains a 1.
    """
    if "+avx512dq" not in cpu_features():
        whole = _call(b, "llvm.floor.v16f32", x)
        value = _one_and_more(b, b.fsub(x, whole), _EXP2_TO_BF16)
        return _times_power(b, value, b.fptosi(whole, _INTEGERS), x)
    nothing = ir.Constant(_FLOATS, None)
    all_lanes = ir.Constant(ir.IntType(16), -1)
    as_set = _I32(4)
    # x - floor(x)
    rest = _call(
        b, "llvm.x86.avx512.mask.reduce.ps.512", x, _I32(0b1001), nothing, all_lanes, as_set
    )
    return _call(
        b,
        "llvm.x86.avx512.mask.scalef.ps.512",
        _one_and_more(b, rest, _EXP2_TO_BF16),
        x,
        nothing,
        all_lanes,
        as_set,
    )


def _one_and_more(b, x, coefficients):
    value = constant(coefficients[-1])
    for coefficient in (*coefficients[-2::-1], 1.0):
        value = _fma(b, value, x, constant(coefficient))
    return value


def _times_power(b, value, exponent, x):
    """Compute value * 2^exponent from the exponent's lowest nine bits; 0 below the lowest x."""
    power = b.shl(exponent, ir.Constant(_INTEGERS, [23] * LANES))
    value = b.bitcast(b.add(b.bitcast(value, _INTEGERS), power), _FLOATS)
    return b.select(b.fcmp_ordered("<", x, constant(_LOWEST)), constant(0.0), value)


def _call(b, name, *arguments):
    kind = ir.FunctionType(_FLOATS, [argument.type for argument in arguments])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), arguments)


def to_bf16(b, x):
    """Return the bits of x rounded to the nearest bf16, ties to even.

    x is 0 or far from subnormal. NaN stays NaN.
    """
    if has_pair_products():
        kind = ir.FunctionType(ir.VectorType(BFLOAT, LANES), [_FLOATS])
        round_ = cgutils.get_or_insert_function(
            b.module, kind, "llvm.x86.avx512bf16.cvtneps2bf16.512"
        )
        return b.bitcast(b.call(round_, [x]), ir.VectorType(_I16, LANES))
    bits = b.bitcast(x, _INTEGERS)
    odd = b.and_(
        b.lshr(bits, ir.Constant(_INTEGERS, [16] * LANES)), ir.Constant(_INTEGERS, [1] * LANES)
    )
    nearest = b.add(b.add(bits, ir.Constant(_INTEGERS, [0x7FFF] * LANES)), odd)
    kept = b.select(
        b.fcmp_unordered("uno", x, x), ir.Constant(_INTEGERS, [0x7FC00000] * LANES), nearest
    )
    return b.trunc(b.lshr(kept, ir.Constant(_INTEGERS, [16] * LANES)), ir.VectorType(_I16, LANES))


def _fma(b, x, y, z):
    return _call(b, "llvm.fma.v16f32", x, y, z)


def constant(value):
    return ir.Constant(_FLOATS, [value] * LANES)
