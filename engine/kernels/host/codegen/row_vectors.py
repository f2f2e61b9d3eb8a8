"""Row operations of norms, rotations and gates, in vectors of 16 lanes.

LLVM vectorizes such loops as well, but rounds to bf16 in seven instructions where some CPUs have a
single one. The last vector of a row may be partial.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.host.codegen.softmax_blocks import constant, exp2_to_bf16, to_bf16
from engine.kernels.host.codegen.strided_loops import Lines, counted
from engine.kernels.host.codegen.vectors import LANES, in_all_lanes, widened

_I1 = ir.IntType(1)
_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_F32 = ir.FloatType()
_FLOATS = ir.VectorType(_F32, LANES)
_INTEGERS = ir.VectorType(_I32, LANES)
_SHORTS = ir.VectorType(_I16, LANES)
_MASK = ir.VectorType(_I1, LANES)
_LOG2_E = 1.4426950408889634
_LOWEST = -83.0  # silu is then -7e-35, and 1 + e^83 has a normal reciprocal
_GUESS = 0x7EF311C7  # minus a number's bits: approximately the bits of its reciprocal
_POINTER = _I64.as_pointer()
UPDATED_ROWS = 4  # of `update_rows`
_SUMS = 4  # independent sums, each of every fourth vector


@intrinsic
def norm_row(typing, x, weight, eps, out, width, stored, weighed):
    """Compute out = weight * x / sqrt(mean(x^2) + eps) of `width` numbers, rounded once.

    Arguments are addresses. x and out have the dtype `stored`, the weight has `weighed`
    (`STORED_AS`).
    """
    return _norm(stored, weighed, rounds_first=False)


@intrinsic
def norm_row_rounding_first(typing, x, weight, eps, out, width, stored, weighed):
    """Compute `norm_row`, but round the quotient to x's dtype before the multiplication as well."""
    return _norm(stored, weighed, rounds_first=True)


def _norm(stored, weighed, *, rounds_first: bool):
    def generate(context, b, signature, arguments):
        x, weight, eps, out, width, *_ = arguments
        row, result = (_RowNumbers(b, stored.dtype, address) for address in (x, out))
        weights = _RowNumbers(b, weighed.dtype, weight)
        mean = b.fdiv(_sum_of_squares(b, row, width), b.sitofp(width, _F32))
        factor = in_all_lanes(b, b.fdiv(_F32(1.0), _root(b, b.fadd(mean, eps))))

        def scale(place, mask):
            unit = b.fmul(row.load(place, mask), factor)
            if rounds_first:
                unit = row.rounded(unit)
            result.store(b.fmul(unit, weights.load(place, mask)), place, mask)

        _for_each(b, _I64(0), width, scale)
        return context.get_dummy_value()

    return types.void(
        types.int64, types.int64, types.float32, types.int64, types.int64, stored, weighed
    ), generate


@intrinsic
def turn_row(typing, x, cos, sin, out, half, width, stored):
    """Rotate the pairs (i, i + half) of a row and copy the rest; out may be x."""

    def generate(context, b, signature, arguments):
        x, cos, sin, out, half, width, _ = arguments
        row, along, across, result = (
            _RowNumbers(b, stored.dtype, address) for address in (x, cos, sin, out)
        )
        lines = Lines(b, LANES)

        def turn(place, mask):
            first = row.load(place, mask)
            second = row.load(b.add(half, place), mask)
            c = along.load(place, mask)
            s = across.load(place, mask)
            result.store(lines.fma(first, c, b.fneg(b.fmul(second, s))), place, mask)
            result.store(lines.fma(second, c, b.fmul(first, s)), b.add(half, place), mask)

        def keep(place, mask):
            result.store(row.load(place, mask), place, mask)

        _for_each(b, _I64(0), half, turn)
        turned = b.add(half, half)
        _for_each(b, turned, b.sub(width, turned), keep)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6, stored), generate


@intrinsic
def add_row(typing, x, other, out, width, stored):
    """Compute out = x + other, `width` numbers each; out may be one of them."""

    def generate(context, b, signature, arguments):
        x, other, out, width, _ = arguments
        first, second, result = (
            _RowNumbers(b, stored.dtype, address) for address in (x, other, out)
        )

        def add(place, mask):
            result.store(b.fadd(first.load(place, mask), second.load(place, mask)), place, mask)

        _for_each(b, _I64(0), width, add)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, stored), generate


@intrinsic
def update_row(typing, factors, stride, matrix, matrix_stride, rank, rows, width, stored):
    """Compute `update_rows` of one row."""
    return _update(stored, 1)


@intrinsic
def update_rows(typing, factors, stride, matrix, matrix_stride, rank, rows, width, stored):
    """Add to each of UPDATED_ROWS rows its sum over `rank` terms of factor * line of the matrix.

    The sums are in fp32 and in the order of the terms, with fused multiply-adds. The factors of a
    row are fp32, `stride` bytes after those of the previous row; `rows` has the addresses of the
    rows.
    """
    return _update(stored, UPDATED_ROWS)


def _update(stored, num_rows: int):
    def generate(context, b, signature, arguments):
        factors, stride, matrix, matrix_stride, rank, rows, width, _ = arguments
        lines = Lines(b, LANES)
        starts = [b.add(factors, b.mul(stride, _I64(row))) for row in range(num_rows)]
        results = [
            _RowNumbers(b, stored.dtype, b.load(b.inttoptr(b.add(rows, _I64(8 * row)), _POINTER)))
            for row in range(num_rows)
        ]

        def update(place, mask):
            def add(term, sums):
                line = _RowNumbers(b, stored.dtype, b.add(matrix, b.mul(term, matrix_stride))).load(
                    place, mask
                )
                offset = b.mul(term, _I64(4))
                return [
                    lines.fma(lines.number(b.add(start, offset)), line, total)
                    for start, total in zip(starts, sums, strict=True)
                ]

            sums = counted(b, rank, [lines.zero()] * num_rows, add)
            for result, total in zip(results, sums, strict=True):
                result.store(b.fadd(result.load(place, mask), total), place, mask)

        _for_each(b, _I64(0), width, update)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7, stored), generate


@intrinsic
def gate_row(typing, gate, up, out, width, stored):
    """Compute out = silu(gate) * up of `width` numbers each, rounded once."""

    def generate(context, b, signature, arguments):
        gate, up, out, width, _ = arguments
        gates, ups, result = (_RowNumbers(b, stored.dtype, each) for each in (gate, up, out))

        def open_(place, mask):
            opened = _silu(b, gates.load(place, mask))
            result.store(b.fmul(opened, ups.load(place, mask)), place, mask)

        _for_each(b, _I64(0), width, open_)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, stored), generate


@intrinsic
def open_row(typing, x, other, count):
    """Compute x = silu(x) * other of `count` fp32 numbers each.

    The relative error is 1e-5, for results that are rounded to bf16.
    """

    def generate(context, b, signature, arguments):
        x, other, count = arguments
        row, others = (_RowNumbers(b, types.float32, address) for address in (x, other))

        def open_(place, mask):
            read = row.load(place, mask)
            row.store(b.fmul(_silu(b, read), others.load(place, mask)), place, mask)

        _for_each(b, _I64(0), count, open_)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


class _RowNumbers:
    """Contiguous bf16 or fp32 numbers at an address, as vectors of fp32."""

    def __init__(self, builder, kind, address) -> None:
        self._b = builder
        self._address = address
        self._is_short = kind is types.uint16
        self._kind, self._bytes = (_SHORTS, 2) if self._is_short else (_FLOATS, 4)

    def load(self, place, mask=None):
        """Load the numbers from index `place` on; 0 if the mask is not set."""
        b = self._b
        at = self._at(place)
        if mask is None:
            read = b.load(at, align=self._bytes)
        else:
            kind = ir.FunctionType(self._kind, [at.type, _I32, _MASK, self._kind])
            called = cgutils.get_or_insert_function(
                b.module, kind, f"llvm.masked.load.{self._suffix()}.p0"
            )
            read = b.call(called, [at, _I32(self._bytes), mask, ir.Constant(self._kind, None)])
        if not self._is_short:
            return read
        return widened(b, read)

    def store(self, value, place, mask=None) -> None:
        b = self._b
        at = self._at(place)
        if self._is_short:
            value = to_bf16(b, value)
        if mask is None:
            b.store(value, at, align=self._bytes)
        else:
            kind = ir.FunctionType(ir.VoidType(), [self._kind, at.type, _I32, _MASK])
            called = cgutils.get_or_insert_function(
                b.module, kind, f"llvm.masked.store.{self._suffix()}.p0"
            )
            b.call(called, [value, at, _I32(self._bytes), mask])

    def rounded(self, value):
        """Return the value as it would be loaded after a store."""
        return widened(self._b, to_bf16(self._b, value)) if self._is_short else value

    def _at(self, place):
        b = self._b
        return b.inttoptr(
            b.add(self._address, b.mul(place, _I64(self._bytes))), self._kind.as_pointer()
        )

    def _suffix(self) -> str:
        return f"v{LANES}{'i16' if self._is_short else 'f32'}"


def _for_each(b, start, count, write):
    """Call `write(place, mask)` for each vector, as in `_over`."""

    def step(place, values, mask):
        write(place, mask)
        return values

    _over(b, start, count, (), step)


def _over(b, start, count, values, step):
    """Call `step(place, values, mask)` for vectors of `count` numbers from index `start` on.

    The mask is None except for a partial last vector. Return the values after all steps.
    """
    whole = b.ashr(count, _I64(4))
    rest = b.and_(count, _I64(LANES - 1))
    values = counted(
        b,
        whole,
        list(values),
        lambda index, now: step(b.add(start, b.mul(index, _I64(LANES))), now, None),
    )
    lanes = ir.Constant(_INTEGERS, list(range(LANES)))
    mask = b.icmp_signed("<", lanes, in_all_lanes(b, b.trunc(rest, _I32)))
    behind = b.add(start, b.mul(whole, _I64(LANES)))
    return counted(
        b,
        b.zext(b.icmp_signed(">", rest, _I64(0)), _I64),
        values,
        lambda index, now: step(behind, now, mask),
    )


def _sum_of_squares(b, row: _RowNumbers, width):
    """Return the sum as one number."""
    lines = Lines(b, LANES)

    def add(place, total, mask=None):
        read = row.load(place, mask)
        return lines.fma(read, read, total)

    wide = b.ashr(width, _I64(6))
    sums = counted(
        b,
        wide,
        [lines.zero()] * _SUMS,
        lambda index, now: [
            add(b.add(b.mul(index, _I64(_SUMS * LANES)), _I64(LANES * part)), total)
            for part, total in enumerate(now)
        ],
    )
    start = b.mul(wide, _I64(_SUMS * LANES))
    sums[:1] = _over(
        b, start, b.sub(width, start), sums[:1], lambda place, now, mask: [add(place, now[0], mask)]
    )
    while len(sums) > 1:
        sums = [b.fadd(*sums[place : place + 2]) for place in range(0, len(sums), 2)]
    total = sums[0]
    for distance in (8, 4, 2, 1):
        places = ir.Constant(_INTEGERS, [lane ^ distance for lane in range(LANES)])
        total = b.fadd(total, b.shuffle_vector(total, total, places))
    return b.extract_element(total, _I32(0))


def _root(b, number):
    called = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(_F32, [_F32]), "llvm.sqrt.f32"
    )
    return b.call(called, [number])


def _silu(b, x):
    """Compute x / (1 + e^-x).

    The quotient is computed by multiplications: a division would take longer than all other steps,
    and the CPUs' own reciprocal estimates differ between vendors.
    """
    lines = Lines(b, LANES)
    x = b.select(b.fcmp_ordered("<", x, constant(_LOWEST)), constant(_LOWEST), x)  # NaN stays NaN
    below = b.fadd(exp2_to_bf16(b, b.fmul(x, constant(-_LOG2_E))), constant(1.0))
    guess = b.bitcast(
        b.sub(ir.Constant(_INTEGERS, [_GUESS] * LANES), b.bitcast(below, _INTEGERS)), _FLOATS
    )
    # the error is at most 0.13, then its third power, then the third power of that
    for _ in range(2):
        off = lines.fma(b.fneg(below), guess, constant(1.0))
        guess = lines.fma(guess, lines.fma(off, off, off), guess)
    return b.fmul(x, guess)
