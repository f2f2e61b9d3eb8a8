"""fp32 matrix products in place, with any distance between rows.

They are for operands that are used once and so are not worth packing (`dot.py` is for packed
operands). Every output element is one sum to which the terms 0, 1, ... K-1 are added in order by
fused multiply-add. So its bits are the same in any tile, for any number of rows and columns.
Kernels that contain this are compiled with STRICT numbers (`compiled.py`), otherwise LLVM may
regroup the sums.
"""

from collections.abc import Callable

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.host.codegen.compiled import STRICT_PART

LANES = 16
LINE_BYTES = 64

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_F32 = ir.FloatType()


class Lines:
    """LLVM code on groups of `lanes` adjacent columns; 1 for the rest of a row."""

    def __init__(self, builder, lanes: int) -> None:
        self._b = builder
        self.lanes = lanes
        self.kind = ir.VectorType(_F32, lanes) if lanes > 1 else _F32

    def zero(self):
        return ir.Constant(self.kind, [0.0] * self.lanes if self.lanes > 1 else 0.0)

    def load(self, address, group: int = 0):
        return self._b.load(self._pointer(address, group), align=4)

    def store(self, value, address, group: int = 0) -> None:
        self._b.store(value, self._pointer(address, group), align=4)

    def number(self, address):
        """Load the number at the address into all lanes."""
        return self.spread(self._b.load(self._b.inttoptr(address, _F32.as_pointer()), align=4))

    def spread(self, value):
        if self.lanes == 1:
            return value
        nothing = ir.Constant(self.kind, ir.Undefined)
        places = ir.Constant(ir.VectorType(_I32, self.lanes), [0] * self.lanes)
        return self._b.shuffle_vector(
            self._b.insert_element(nothing, value, _I32(0)), nothing, places
        )

    def fma(self, a, b, c):
        name = f"llvm.fma.v{self.lanes}f32" if self.lanes > 1 else "llvm.fma.f32"
        called = cgutils.get_or_insert_function(
            self._b.module, ir.FunctionType(self.kind, [self.kind] * 3), name
        )
        return self._b.call(called, [a, b, c])

    def _pointer(self, address, group: int):
        return self._b.inttoptr(
            self._b.add(address, _I64(4 * self.lanes * group)), self.kind.as_pointer()
        )


def counted(builder, count, first, step):
    """Write a loop of `count` rounds and return the values after the last round.

    `step(index, values)` returns the values after one more round. Without rounds the result is
    `first`.
    """
    b = builder
    entry = builder.block
    loop = b.append_basic_block("round")
    done = b.append_basic_block("done")
    b.cbranch(b.icmp_signed(">", count, _I64(0)), loop, done)
    b.position_at_end(loop)
    index = b.phi(_I64)
    index.add_incoming(_I64(0), entry)
    values = [b.phi(value.type) for value in first]
    for phi, value in zip(values, first, strict=True):
        phi.add_incoming(value, entry)
    after = step(index, values)
    following = b.add(index, _I64(1))
    index.add_incoming(following, b.block)
    for phi, value in zip(values, after, strict=True):
        phi.add_incoming(value, b.block)
    last = b.block
    b.cbranch(b.icmp_signed("<", following, count), loop, done)
    b.position_at_end(done)
    results = [b.phi(value.type) for value in first]
    for phi, before, value in zip(results, first, after, strict=True):
        phi.add_incoming(before, entry)
        phi.add_incoming(value, last)
    return results


class Routine:
    """A function f(int64, ...) -> None with the body `write(builder, *arguments)`, once per kernel.

    It is internal to the kernel, so code of another library cannot replace it. With `apart` it
    stays a function even if it has a single call: inlined into much other code, LLVM keeps fewer
    values in registers.
    """

    def __init__(
        self, name: str, num_arguments: int, write: Callable[..., None], *, apart: bool = False
    ) -> None:
        self._name = name
        self._num_arguments = num_arguments
        self._write = write
        self._apart = apart

    def call(self, builder, *arguments) -> None:
        """Write a call at the builder's position."""
        function = builder.module.globals.get(self._name)
        if function is None:
            kind = ir.FunctionType(ir.VoidType(), [_I64] * self._num_arguments)
            function = ir.Function(builder.module, kind, self._name)
            function.linkage = "internal"
            if self._apart:
                function.attributes.add("noinline")
            inner = ir.IRBuilder(function.append_basic_block("entry"))
            self._write(inner, *function.args)
            inner.ret_void()
        builder.call(function, arguments)

    def typed(self):
        """Return the signature and the code generator of an intrinsic for this routine."""

        def generate(context, builder, signature, arguments):
            self.call(builder, *arguments)
            return context.get_dummy_value()

        return types.void(*[types.int64] * self._num_arguments), generate


def _tile(rows: int, groups: int, lanes: int) -> Routine:
    """Return f(a, a_row, a_step, b, b_step, c, c_row, count).

    It computes c [rows, groups * lanes] += a [rows, count] b [count, ...].
    """

    def write(builder, a, a_row, a_step, b, b_step, c, c_row, count) -> None:
        lines = Lines(builder, lanes)
        places = [(m, n) for m in range(rows) for n in range(groups)]
        outs = [builder.add(c, builder.mul(c_row, _I64(m))) for m in range(rows)]

        def step(k, sums):
            line = builder.add(b, builder.mul(b_step, k))
            term = builder.add(a, builder.mul(a_step, k))
            columns = [lines.load(line, n) for n in range(groups)]
            factors = [
                lines.number(builder.add(term, builder.mul(a_row, _I64(m)))) for m in range(rows)
            ]
            return [
                lines.fma(factors[m], columns[n], total)
                for (m, n), total in zip(places, sums, strict=True)
            ]

        sums = counted(builder, count, [lines.load(outs[m], n) for m, n in places], step)
        for (m, n), total in zip(places, sums, strict=True):
            lines.store(total, outs[m], n)

    return Routine(f"add_tile_{rows}_{groups}_{lanes}", 8, write)


# Tiles by width, for a few rows and for one row. The sums of the first kind fill the registers.
_TILES = (
    (4 * LANES, 4, _tile(4, 4, LANES), _tile(1, 4, LANES)),
    (LANES, 8, _tile(8, 1, LANES), _tile(1, 1, LANES)),
    (1, 1, _tile(1, 1, 1), _tile(1, 1, 1)),
)


def stride_by(builder, start, end, size: int, write):
    """Call `write(index)` for start, start + size, ... while a whole step fits before `end`.

    Return the index after the last step.
    """
    b = builder
    entry = builder.block
    head, body, done = (b.append_basic_block(name) for name in ("head", "body", "done"))
    b.branch(head)
    b.position_at_end(head)
    index = b.phi(_I64)
    index.add_incoming(start, entry)
    following = b.add(index, _I64(size))
    b.cbranch(b.icmp_signed("<=", following, end), body, done)
    b.position_at_end(body)
    write(index)
    index.add_incoming(following, b.block)
    b.branch(head)
    b.position_at_end(done)
    return index


def _write_product(builder, a, a_row, a_step, b, b_step, c, c_row, num_rows, width, count) -> None:
    column = _I64(0)
    for tile_width, tile_rows, tile, line in _TILES:

        def columns(at, tile_rows=tile_rows, tile=tile, line=line):
            offset = builder.mul(at, _I64(4))
            b_at = builder.add(b, offset)
            c_at = builder.add(c, offset)

            def call(routine, row):
                a_from, c_to = (
                    builder.add(at, builder.mul(row, size))
                    for at, size in ((a, a_row), (c_at, c_row))
                )
                routine.call(builder, a_from, a_row, a_step, b_at, b_step, c_to, c_row, count)

            row = stride_by(builder, _I64(0), num_rows, tile_rows, lambda row: call(tile, row))
            stride_by(builder, row, num_rows, 1, lambda row: call(line, row))

        column = stride_by(builder, column, width, tile_width, columns)


PRODUCT = Routine("add_product", 10, _write_product)


def _write_lower_product(builder, a, a_row, b, b_step, c, c_row, num_rows, width, ahead) -> None:
    def at(first, row, size):
        return builder.add(first, builder.mul(row, size))

    def line(row, first):
        """Write the product of a row's terms from `first` on."""
        PRODUCT.call(
            builder,
            builder.add(at(a, row, a_row), builder.mul(first, _I64(4))),
            a_row,
            _I64(4),
            at(b, first, b_step),
            b_step,
            at(c, row, c_row),
            c_row,
            _I64(1),
            width,
            builder.add(builder.sub(row, first), ahead),
        )

    def rows(first):
        PRODUCT.call(
            builder,
            at(a, first, a_row),
            a_row,
            _I64(4),
            b,
            b_step,
            at(c, first, c_row),
            c_row,
            _I64(4),
            width,
            first,
        )
        for offset in range(4):
            line(builder.add(first, _I64(offset)), first)

    row = stride_by(builder, _I64(0), num_rows, 4, rows)
    stride_by(builder, row, num_rows, 1, lambda row: line(row, _I64(0)))


LOWER_PRODUCT = Routine("add_lower_product", 9, _write_lower_product)


@intrinsic
def add_product(typing, a, a_row, a_step, b, b_step, c, c_row, num_rows, width, count):
    """Compute c [num_rows, width] += a [num_rows, count] times b [count, width], fp32.

    a, b and c are addresses; a and b must not overlap c. Rows of a are `a_row` bytes apart and its
    terms `a_step`; rows of b are `b_step` apart, rows of c `c_row`. Columns of b and c are
    contiguous.
    """
    return PRODUCT.typed()


@intrinsic
def add_lower_product(typing, a, a_row, b, b_step, c, c_row, num_rows, width, ahead):
    """Compute c [num_rows, width] += a times b for lower triangular a.

    Row i has the terms 0 .. i-1+ahead. With `ahead` 0 the rows of b may be those of c, because a
    row is final when it is used.
    """
    return LOWER_PRODUCT.typed()


@intrinsic
def floats(typing, address):
    """Return the address as a pointer to fp32 numbers."""
    return _pointer_kind(types.float32)


@intrinsic
def integers(typing, address):
    """Return the address as a pointer to int64 numbers."""
    return _pointer_kind(types.int64)


@intrinsic
def shorts(typing, address):
    """Return the address as a pointer to int32 numbers."""
    return _pointer_kind(types.int32)


@intrinsic
def size_of(typing, stored):
    """Return the bytes of a number of this dtype."""
    size = stored.dtype.bitwidth // 8
    return types.int64(stored), lambda context, builder, signature, arguments: context.get_constant(
        types.int64, size
    )


@njit(**STRICT_PART)
def clear(address, count):
    """Set `count` fp32 numbers to 0."""
    numbers = floats(address)
    for place in range(count):
        numbers[place] = 0


@njit(**STRICT_PART)
def scale(address, count, factor):
    """Multiply `count` fp32 numbers by a factor."""
    numbers = floats(address)
    for place in range(count):
        numbers[place] *= factor


@intrinsic
def fetch_line(typing, address):
    """Prefetch a line into the cache."""
    return _fetched(writes=0, locality=2)


@intrinsic
def fetch_for_writing(typing, address):
    """Prefetch a line that will be written; otherwise the write would first have to read it."""
    return _fetched(writes=1, locality=3)


def _fetched(*, writes: int, locality: int):
    def generate(context, builder, signature, arguments):
        write_fetch(builder, arguments[0], writes=writes, locality=locality)
        return context.get_dummy_value()

    return types.void(types.int64), generate


def write_fetch(builder, address, *, writes: int = 0, locality: int = 3) -> None:
    """Prefetch a line into the cache of this locality: 3 is the nearest one, 2 the next."""
    place = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [place, _I32, _I32, _I32])
    called = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(called, [builder.inttoptr(address, place), _I32(writes), _I32(locality), _I32(1)])


def _pointer_kind(element):
    pointer = types.CPointer(element)

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(pointer))

    return pointer(types.int64), generate
