"""Moves of values between the lanes of vectors: transposed keys and paired values."""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.kernels.host.codegen.strided_loops import write_fetch
from engine.kernels.host.codegen.vectors import LANES

_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_INTEGERS = ir.VectorType(_I32, LANES)
_QUARTER = ir.VectorType(_I32, 4)
_HALF = ir.VectorType(_I32, 8)
_SHORTS = ir.VectorType(_I16, 2 * LANES)


@intrinsic
def turn(typing, addresses, offset, out, out_row):
    """Transpose 16 rows of 16 words of 32 bits; vector i then has word i of every row.

    addresses is the address of 16 int64, the addresses of the rows, to each of which `offset` bytes
    are added. The vectors are written to `out`, `out_row` bytes apart.
    """

    def generate(context, builder, signature, arguments):
        _turn(builder, *arguments)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def turn_and_fetch(typing, addresses, offset, out, out_row, ahead, distance):
    """Transpose as `turn` does, and prefetch 32 lines from `ahead` on, `distance` bytes apart."""

    def generate(context, builder, signature, arguments):
        _turn(builder, *arguments)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


def _turn(b, addresses, offset, out, out_row, ahead=None, distance=None):
    rows = [
        b.add(b.load(pointer_at(b, addresses, _I64, 8 * row), align=8), offset)
        for row in range(LANES)
    ]
    for group in range(4):
        # Vector q has these four words of the rows q, q + 4, q + 8, q + 12.
        quarters = [
            [b.load(pointer_at(b, row, _QUARTER, 16 * group), align=4) for row in rows[start::4]]
            for start in range(4)
        ]
        for word, vector in enumerate(_turned(b, [_joined(b, quarter) for quarter in quarters])):
            at = b.add(out, b.mul(out_row, _I64(4 * group + word)))
            b.store(vector, pointer_at(b, at, _INTEGERS, 0), align=4)
            for line in () if ahead is None else (0, 1):
                write_fetch(
                    b,
                    b.add(ahead, b.mul(distance, _I64(2 * (4 * group + word) + line))),
                    locality=2,
                )


def words_of(b, rows):
    """Transpose eight words of 32 bits at each of 16 addresses.

    Return eight vectors; vector i has word i of every row.
    """
    halves = [b.load(pointer_at(b, row, _HALF, 0), align=4) for row in rows]
    # Vector q has these words of the rows q and q + 4. So the quarters 0 and 2 of the transposed
    # vectors have the words 0..3, the others 4..7.
    low, high = (
        _turned(
            b,
            [
                b.shuffle_vector(halves[row], halves[row + 4], lane_indices(range(LANES)))
                for row in range(first, first + 4)
            ],
        )
        for first in (0, 8)
    )
    return [
        b.shuffle_vector(
            low[word],
            high[word],
            lane_indices(4 * quarter + lane for quarter in range(part, 8, 2) for lane in range(4)),
        )
        for part in (0, 1)
        for word in range(4)
    ]


def _turned(b, vectors):
    """Transpose four groups of 4 x 4 words at once."""
    low = [_mixed(b, vectors[i], vectors[j], (0, 16, 1, 17)) for i, j in ((0, 1), (2, 3))]
    high = [_mixed(b, vectors[i], vectors[j], (2, 18, 3, 19)) for i, j in ((0, 1), (2, 3))]
    return [
        _mixed(b, first, second, places)
        for first, second in (low, high)
        for places in ((0, 1, 16, 17), (2, 3, 18, 19))
    ]


def _joined(b, quarters):
    halves = [
        b.shuffle_vector(quarters[i], quarters[i + 1], lane_indices(range(8))) for i in (0, 2)
    ]
    return b.shuffle_vector(*halves, lane_indices(range(16)))


def _mixed(b, first, second, places):
    """Return the same four places of each quarter of two vectors."""
    return b.shuffle_vector(
        first, second, lane_indices(place + 4 * quarter for quarter in range(4) for place in places)
    )


@intrinsic
def put_in_pairs(typing, first, second, out, out_stride):
    """Combine two rows of 32 bf16 to two vectors of pairs (first's, second's).

    The channels 0..15 are written to `out`, the others `out_stride` bytes after it.
    """

    def generate(context, b, signature, arguments):
        first, second, out, stride = arguments
        rows = [b.load(pointer_at(b, row, _SHORTS, 0), align=2) for row in (first, second)]
        for half, at in enumerate((out, b.add(out, stride))):
            places = lane_indices(
                place
                for channel in range(LANES)
                for place in (channel + LANES * half, channel + LANES * half + 2 * LANES)
            )
            b.store(b.shuffle_vector(*rows, places), pointer_at(b, at, _SHORTS, 0), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


def pairs_of(b, first, second):
    """Combine two rows of 32 bf16 to two vectors of pairs, which stay in registers.

    The order of channels is that of a single instruction: 0..3, 8..11, 16..19 and 24..27 in the
    first vector, the others in the second.
    """
    rows = [b.load(pointer_at(b, row, _SHORTS, 0), align=2) for row in (first, second)]
    return [
        b.shuffle_vector(
            *rows,
            lane_indices(
                place + 8 * quarter
                for quarter in range(4)
                for channel in range(4)
                for place in (channel + 4 * half, channel + 4 * half + 2 * LANES)
            ),
        )
        for half in (0, 1)
    ]


def mixed_quarters(b, first, second):
    """Reorder 32 channels of fp32 in two vectors from channel order to that of `pairs_of`."""
    return [
        b.shuffle_vector(
            first,
            second,
            lane_indices(
                4 * half + 8 * quarter + lane for quarter in range(4) for lane in range(4)
            ),
        )
        for half in (0, 1)
    ]


def mixed_halves(b, first, second):
    """Reorder the channels from the order of `pairs_of` to channel order."""
    return [
        b.shuffle_vector(
            first,
            second,
            lane_indices(
                8 * half + 4 * quarter + 16 * which + lane
                for quarter in range(2)
                for which in (0, 1)
                for lane in range(4)
            ),
        )
        for half in (0, 1)
    ]


def lane_indices(places):
    places = list(places)
    return ir.Constant(ir.VectorType(_I32, len(places)), places)


def pointer_at(b, address, kind, offset):
    return b.inttoptr(b.add(address, _I64(offset)), kind.as_pointer())
