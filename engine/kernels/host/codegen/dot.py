"""Innermost loop of every product on the host: a few rows times a few blocks of 16 columns.

An operand is packed so that one load is 16 columns: bf16 as [N/16][K/2][16][2] with pairs of
consecutive terms of k, fp32 as [N/16][K][16], bytes as [N/16][K/4][16][4]. Every output element is
one sum that depends only on its row of x and its column of w. Sums of bytes are integers. In fp32
the terms 0, 1, ... K-1 are added in order by fused multiply-add (of a bf16 pair the second one
first). So the bits are the same for any number of rows and blocks. They are also the same for
`vdpbf16ps` and for widened multiply-adds, unless a term or sum is subnormal (`vdpbf16ps` treats
those as 0).

`dot_block` generates LLVM code that becomes part of the kernel: no call, no symbol. Such a kernel
is compiled with STRICT numbers (`compiled.py`), otherwise LLVM may regroup its sums.
"""

from enum import StrEnum
from functools import cache

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from engine.kernels.host.codegen.strided_loops import Routine

LANES = 16  # columns of a block
BLOCK_STEP_BYTES = 64  # bytes of a block that one step reads: 16 columns x 2 bf16 or 1 fp32

_I8 = ir.IntType(8)
_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_F32 = ir.FloatType()
_FLOATS = ir.VectorType(_F32, LANES)
_INTEGERS = ir.VectorType(_I32, LANES)


class Form(StrEnum):
    """The dtypes of a product.

    The `steps` of a loop are 32-bit words of w: one fp32 term, two bf16 terms, or four bytes.
    """

    BF16 = "bf16"  # x bf16, w bf16 pairs
    MIXED = "mixed"  # x fp32, w bf16 pairs, widened
    FP32 = "fp32"  # both fp32
    BYTES = "bytes"  # x int8, w uint8, four terms per step, sums int32


class _BFloat(ir.types.Type):
    """LLVM's bfloat, which llvmlite does not provide."""

    null = "0.0"

    def _to_string(self) -> str:
        return "bfloat"

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BFLOAT = _BFloat()
_PAIRS = ir.VectorType(BFLOAT, 2 * LANES)


def has_pair_products() -> bool:
    """Return whether kernels multiply bf16 pairs.

    This needs AVX512-BF16 (Zen 4, Cooper Lake, Sapphire Rapids and later).
    """
    return "+avx512bf16" in cpu_features()


def has_wide_vectors() -> bool:
    """Return whether a block is one vector of the CPU (AVX-512, which has 32 registers)."""
    return "+avx512f" in cpu_features()


@cache
def cpu_features() -> frozenset[str]:
    """Return the features that numba compiles for.

    They are those of this CPU, unless NUMBA_CPU_NAME and NUMBA_CPU_FEATURES are set.
    """
    _triple, _name, features = cpu_target.target_context.codegen().magic_tuple()
    return frozenset(features.split(","))


@cache
def dot_block(
    rows: int,
    blocks: int,
    form: Form,
    *,
    adds: bool = False,
    ahead_bytes: int = 1024,
    widened: bool | None = None,
):
    """Return a product for compiled code.

    It is f(x, x_row_bytes, w, w_block_bytes, y, y_row_bytes, steps), all int64: y [rows, 16 *
    blocks], fp32, or int32 for bytes, = x [rows, K] times the blocks at w. x, w and y are addresses
    of any alignment. Rows of x and y are `x_row_bytes` and `y_row_bytes` apart, blocks of w
    `w_block_bytes`. Terms of a row of x and columns of a row of y are contiguous. `steps` may be 0.
    On AVX-512 all sums stay in registers if rows * blocks is at most 24.

    Args:
        adds: sums start from the content of y.
        ahead_bytes: the distance from w of the prefetched data; 0 for none.
        widened: compute bf16 pairs by widened multiply-adds; the default if the CPU has no other
            way.
    """
    widened = not has_pair_products() if widened is None else widened

    @intrinsic
    def multiply(typing, x, x_row_bytes, w, w_block_bytes, y, y_row_bytes, steps):
        def generate(context, builder, signature, arguments):
            ahead = (_I64(ahead_bytes), _I64(BLOCK_STEP_BYTES)) if ahead_bytes else None
            _Loop(builder, arguments, ahead, None, rows, blocks, form, adds, widened).build()
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), generate

    return multiply


def write_rows(
    builder, arguments, max_rows: int, blocks: int, form: Form, *, first_rows: int = 1
) -> None:
    """Write `dot_block` for `first_rows` to `max_rows` rows at the builder's position.

    With another number of rows the code does nothing. `arguments` are the number of rows, and the
    arguments of `dot_block`. Then follow the distance of prefetching from a block's first weights
    and its advance per step. The last ones are those of `sum_tree.join`: the number of earlier sums
    to add (none for bytes), and the addresses of the second and the third of them.
    """
    end = builder.append_basic_block("end")
    choice = builder.switch(arguments[0], end)
    for count in range(first_rows, max_rows + 1):
        case = builder.append_basic_block(f"rows_{count}")
        choice.add_case(_I64(count), case)
        builder.position_at_end(case)
        _rows(count, blocks, form).call(builder, *arguments[1:])
        builder.branch(end)
    builder.position_at_end(end)


@cache
def _rows(rows: int, blocks: int, form: Form) -> Routine:
    def write(builder, *arguments) -> None:
        earlier = None if form is Form.BYTES else arguments[9:]
        _Loop(
            builder,
            arguments[:7],
            arguments[7:9],
            earlier,
            rows,
            blocks,
            form,
            False,  # noqa: FBT003
            not has_pair_products(),
        ).build()

    return Routine(f"{form}_{rows}_rows_{blocks}_blocks", 12, write, apart=True)


class _Loop:
    """A generator of the loop of one `dot_block` at the builder's position."""

    def __init__(
        self, builder, arguments, ahead, earlier, rows, blocks, form, adds, widened
    ) -> None:
        self._b = builder
        self._ahead = ahead
        self._earlier = earlier
        self._x, self._x_row, self._w, self._w_block, self._y, self._y_row, self._steps = arguments
        self._rows, self._blocks, self._form = range(rows), range(blocks), form
        self._adds = adds
        self._widened = widened
        self._sums = _INTEGERS if form is Form.BYTES else _FLOATS

    def build(self) -> None:
        b = self._b
        first = [[self._first_sum(m, n) for n in self._blocks] for m in self._rows]
        entry = b.block
        loop = b.append_basic_block("k")
        done = b.append_basic_block("done")
        b.cbranch(b.icmp_signed(">", self._steps, _I64(0)), loop, done)
        b.position_at_end(loop)
        k = b.phi(_I64)
        k.add_incoming(_I64(0), entry)
        sums = [[self._phi(value, entry) for value in row] for row in first]
        after_sums = self._step(k, sums)
        after = b.add(k, _I64(1))
        k.add_incoming(after, loop)
        for row, after_row in zip(sums, after_sums, strict=True):
            for phi, value in zip(row, after_row, strict=True):
                phi.add_incoming(value, loop)
        b.cbranch(b.icmp_signed("<", after, self._steps), loop, done)
        b.position_at_end(done)
        results = [[self._phi(value, entry) for value in row] for row in first]
        for m in self._rows:
            for n in self._blocks:
                results[m][n].add_incoming(after_sums[m][n], loop)
        if self._earlier is not None:
            results = self._joined(results)
        for m in self._rows:
            for n in self._blocks:
                b.store(results[m][n], self._sum_address(m, n), align=4)

    def _joined(self, sums):
        """Add the earlier sums: the last one + these, the one before it + that, and so on."""
        b = self._b
        (num_earlier, second, third) = self._earlier
        for place, at in ((3, third), (2, second), (1, self._y)):
            before = b.block
            adding = b.append_basic_block(f"add_{place}")
            after = b.append_basic_block(f"added_{place}")
            b.cbranch(b.icmp_signed(">=", num_earlier, _I64(place)), adding, after)
            b.position_at_end(adding)
            added = [
                [
                    b.fadd(b.load(self._sum_address(m, n, at), align=4), sums[m][n])
                    for n in self._blocks
                ]
                for m in self._rows
            ]
            b.branch(after)
            b.position_at_end(after)
            joined = [[b.phi(self._sums) for _ in self._blocks] for _ in self._rows]
            for m in self._rows:
                for n in self._blocks:
                    joined[m][n].add_incoming(sums[m][n], before)
                    joined[m][n].add_incoming(added[m][n], adding)
            sums = joined
        return sums

    def _step(self, k, sums):
        """Return the sums after one more step."""
        weights = [self._weights(k, n) for n in self._blocks]
        results = []
        for m in self._rows:
            row = list(sums[m])
            for place, value in enumerate(self._values(k, m)):
                row = [self._add(row[n], weights[n][place], value) for n in self._blocks]
            results.append(row)
        return results

    def _weights(self, k, n):
        """Return block n's vectors of this step, in the order in which they are added."""
        b = self._b
        block = b.add(self._w, b.mul(self._w_block, _I64(n)))
        address = b.add(block, b.mul(k, _I64(BLOCK_STEP_BYTES)))
        if self._ahead is not None:
            fetch = cgutils.get_or_insert_function(
                b.module,
                ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32]),
                "llvm.prefetch.p0",
            )
            distance, step = self._ahead
            ahead = b.inttoptr(b.add(b.add(block, distance), b.mul(k, step)), _I8.as_pointer())
            b.call(fetch, [ahead, _I32(0), _I32(3), _I32(1)])
        if self._form is Form.FP32:
            return [b.load(b.inttoptr(address, _FLOATS.as_pointer()), align=4)]
        words = b.load(b.inttoptr(address, _INTEGERS.as_pointer()), align=4)
        if self._form is Form.BYTES:
            return [words]
        return self._halves(words) if self._widens() else [b.bitcast(words, _PAIRS)]

    def _values(self, k, m):
        """Return row m's values of this step, each in all lanes, in the order of `_weights`."""
        b = self._b
        row = self._b.add(self._x, self._b.mul(self._x_row, _I64(m)))
        if self._form is Form.FP32:
            return [self._splat(self._load(b.add(row, b.mul(k, _I64(4))), _F32))]
        if self._form is Form.MIXED:
            pair = b.add(row, b.mul(k, _I64(8)))
            return [self._splat(self._load(b.add(pair, _I64(4 * place)), _F32)) for place in (1, 0)]
        word = self._splat(self._load(b.add(row, b.mul(k, _I64(4))), _I32))
        if self._form is Form.BYTES:
            return [word]
        return self._halves(word) if self._widened else [b.bitcast(word, _PAIRS)]

    def _add(self, total, weights, values):
        b = self._b
        if self._form is Form.BYTES:
            return _add_bytes(b, total, weights, values)
        if self._widens() or self._form is Form.FP32:
            name = "llvm.fma.v16f32"
            operand = _FLOATS
            fma = cgutils.get_or_insert_function(
                b.module, ir.FunctionType(_FLOATS, [operand] * 3), name
            )
            return b.call(fma, [weights, values, total])
        return add_pairs(b, total, weights, values)

    def _widens(self) -> bool:
        return self._form is Form.MIXED or (self._form is Form.BF16 and self._widened)

    def _halves(self, pairs):
        """Return the second and the first bf16 of each lane as fp32."""
        b = self._b
        even = b.shl(pairs, ir.Constant(_INTEGERS, [16] * LANES))
        odd = b.and_(pairs, ir.Constant(_INTEGERS, [-65536] * LANES))
        return [b.bitcast(half, _FLOATS) for half in (odd, even)]

    def _load(self, address, kind):
        return self._b.load(self._b.inttoptr(address, kind.as_pointer()), align=2)

    def _splat(self, value):
        return in_all_lanes(self._b, value)

    def _phi(self, value, entry):
        phi = self._b.phi(value.type)
        phi.add_incoming(value, entry)
        return phi

    def _first_sum(self, m, n):
        if self._adds:
            return self._b.load(self._sum_address(m, n), align=4)
        return ir.Constant(self._sums, None)

    def _sum_address(self, m, n, y=None):
        b = self._b
        offset = b.add(b.mul(self._y_row, _I64(m)), _I64(n * BLOCK_STEP_BYTES))
        return b.inttoptr(b.add(self._y if y is None else y, offset), self._sums.as_pointer())


def add_pairs(b, total, weights, values):
    """Add the products of two pairs of bf16 to the sum in each lane.

    The pairs are vectors of any type of 64 bytes.
    """
    dot = cgutils.get_or_insert_function(
        b.module,
        ir.FunctionType(_FLOATS, [_FLOATS, _PAIRS, _PAIRS]),
        "llvm.x86.avx512bf16.dpbf16ps.512",
    )
    return b.call(dot, [total, b.bitcast(weights, _PAIRS), b.bitcast(values, _PAIRS)])


def in_all_lanes(b, value):
    """Return a vector with the value in all columns of a block."""
    vector = ir.VectorType(value.type, LANES)
    nothing = ir.Constant(vector, ir.Undefined)
    return b.shuffle_vector(
        b.insert_element(nothing, value, _I32(0)), nothing, ir.Constant(_INTEGERS, [0] * LANES)
    )


def _add_bytes(b, total, weights, values):
    """Add four unsigned bytes times four signed bytes to the sum in each lane."""
    if {"+avx512vnni", "+avx512f"} <= cpu_features():
        kind = ir.VectorType(_I8, 4 * LANES)
        dot = cgutils.get_or_insert_function(
            b.module,
            ir.FunctionType(_INTEGERS, [_INTEGERS, kind, kind]),
            "llvm.x86.avx512.vpdpbusd.512",
        )
        return b.call(dot, [total, b.bitcast(weights, kind), b.bitcast(values, kind)])
    for place in range(4):
        weight = b.and_(b.lshr(weights, _lanes(8 * place)), _lanes(255))
        value = b.ashr(b.shl(values, _lanes(24 - 8 * place)), _lanes(24))
        total = b.add(total, b.mul(weight, value))
    return total


def _lanes(number: int):
    return ir.Constant(_INTEGERS, [number] * LANES)
