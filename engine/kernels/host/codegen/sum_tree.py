"""The tree in which a product adds its eight sums, ((0+1)+(2+3))+((4+5)+(6+7)).

The sums are added while they are computed, so that the few kept ones stay in a core's nearest
cache. The tree works like a binary counter: after segment s, the number of earlier sums to add is
the number of trailing ones of s, the latest sum first. The result replaces the earliest of them, in
one of three places.
"""

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine.kernels.host.codegen.compiled import STRICT_PART
from engine.kernels.host.codegen.strided_loops import Lines, stride_by
from engine.kernels.host.codegen.vectors import BLOCK_STEP_BYTES, LANES

_UNROLLED = 4


@njit(**STRICT_PART)
def earlier_sums(segment):
    """Return the number of earlier sums to add after this segment, and the place of the result."""
    count = 0
    while segment >> count & 1:
        count += 1
    return count, (segment >> count >> 1 & 1) + (segment >> count >> 2 & 1)


@njit(**STRICT_PART)
def join(num_earlier, out, second, third, sums, count):
    """Compute out = out + (second + (third + sums)) with `num_earlier` earlier sums.

    The earlier sums are the first `num_earlier`, 1 to 3, of out, second and third. Except for the
    counts, each argument is the address of `count` * 16 fp32.
    """
    if num_earlier == 1:
        _add_two(out, out, sums, count)
    elif num_earlier == 2:
        _add_three(out, out, second, sums, count)
    else:
        _add_four(out, out, second, third, sums, count)


def _added(num_sums: int):
    """Return f(out, first, second, ..., count): out = first + (second + (...)), `num_sums` sums."""

    def generate(context, builder, signature, arguments):
        out, *sums, count = arguments
        lines = Lines(builder, LANES)

        def write(index, number: int) -> None:
            for place in range(number):
                at = builder.mul(
                    builder.add(index, ir.Constant(index.type, place)),
                    ir.Constant(index.type, BLOCK_STEP_BYTES),
                )
                values = [lines.load(builder.add(address, at)) for address in sums]
                value = values.pop()
                while values:
                    value = builder.fadd(values.pop(), value)
                lines.store(value, builder.add(out, at))

        rest = stride_by(
            builder,
            ir.Constant(count.type, 0),
            count,
            _UNROLLED,
            lambda index: write(index, _UNROLLED),
        )
        stride_by(builder, rest, count, 1, lambda index: write(index, 1))
        return context.get_dummy_value()

    return types.void(*[types.int64] * (num_sums + 2)), generate


@intrinsic
def _add_two(typing, out, first, second, count):
    return _added(2)


@intrinsic
def _add_three(typing, out, first, second, third, count):
    return _added(3)


@intrinsic
def _add_four(typing, out, first, second, third, fourth, count):
    return _added(4)
