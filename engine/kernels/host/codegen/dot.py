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
from numba.extending import intrinsic

from engine.kernels.host.codegen import nibbles
from engine.kernels.host.codegen.strided_loops import Routine
from engine.kernels.host.codegen.vectors import (
    BLOCK_STEP_BYTES,
    FLOATS,
    I8,
    I32,
    INTEGERS,
    LANES,
    PAIRS,
    add_bytes,
    add_pairs,
    has_pair_products,
    in_all_lanes,
)

_I64 = ir.IntType(64)
_F32 = ir.FloatType()


class Form(StrEnum):
    """The dtypes of a product.

    The `steps` of a loop are 32-bit words of w (one fp32 term, two bf16 terms, or four bytes), or
    groups of 32 terms.
    """

    BF16 = "bf16"  # x bf16, w bf16 pairs
    MIXED = "mixed"  # x fp32, w bf16 pairs, widened
    FP32 = "fp32"  # both fp32
    BYTES = "bytes"  # x int8, w uint8, four terms per step, sums int32
    NIBBLES = "nibbles"  # groups of x and w with their scales (`nibbles.py`)


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
        self._sums = INTEGERS if form is Form.BYTES else FLOATS

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
        end = b.block  # a group has blocks of its own
        k.add_incoming(after, end)
        for row, after_row in zip(sums, after_sums, strict=True):
            for phi, value in zip(row, after_row, strict=True):
                phi.add_incoming(value, end)
        b.cbranch(b.icmp_signed("<", after, self._steps), loop, done)
        b.position_at_end(done)
        results = [[self._phi(value, entry) for value in row] for row in first]
        for m in self._rows:
            for n in self._blocks:
                results[m][n].add_incoming(after_sums[m][n], end)
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
        if self._form is Form.NIBBLES:
            return self._group(k, sums)
        weights = [self._weights(k, n) for n in self._blocks]
        results = []
        for m in self._rows:
            row = list(sums[m])
            for place, value in enumerate(self._values(k, m)):
                row = [self._add(row[n], weights[n][place], value) for n in self._blocks]
            results.append(row)
        return results

    def _group(self, k, sums):
        """Return the sums after one more group."""
        b = self._b
        rows = [
            b.add(
                b.add(self._x, b.mul(self._x_row, _I64(m))), b.mul(k, _I64(nibbles.ROW_GROUP_BYTES))
            )
            for m in self._rows
        ]
        columns = []
        for n in self._blocks:
            block = b.add(self._w, b.mul(self._w_block, _I64(n)))
            for line in range(0, nibbles.GROUP_BYTES, BLOCK_STEP_BYTES):
                self._fetch(b.add(block, _I64(line)), k)
            group = b.add(block, b.mul(k, _I64(nibbles.GROUP_BYTES)))
            columns.append(nibbles.add_group(b, group, rows, [row[n] for row in sums]))
        return list(zip(*columns, strict=True))

    def _fetch(self, block, k):
        """Prefetch the weights that follow those of step k at the set distance."""
        if self._ahead is None:
            return
        b = self._b
        fetch = cgutils.get_or_insert_function(
            b.module,
            ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32]),
            "llvm.prefetch.p0",
        )
        distance, step = self._ahead
        ahead = b.inttoptr(b.add(b.add(block, distance), b.mul(k, step)), I8.as_pointer())
        b.call(fetch, [ahead, I32(0), I32(3), I32(1)])

    def _weights(self, k, n):
        """Return block n's vectors of this step, in the order in which they are added."""
        b = self._b
        block = b.add(self._w, b.mul(self._w_block, _I64(n)))
        address = b.add(block, b.mul(k, _I64(BLOCK_STEP_BYTES)))
        self._fetch(block, k)
        if self._form is Form.FP32:
            return [b.load(b.inttoptr(address, FLOATS.as_pointer()), align=4)]
        words = b.load(b.inttoptr(address, INTEGERS.as_pointer()), align=4)
        if self._form is Form.BYTES:
            return [words]
        return self._halves(words) if self._widens() else [b.bitcast(words, PAIRS)]

    def _values(self, k, m):
        """Return row m's values of this step, each in all lanes, in the order of `_weights`."""
        b = self._b
        row = self._b.add(self._x, self._b.mul(self._x_row, _I64(m)))
        if self._form is Form.FP32:
            return [self._splat(self._load(b.add(row, b.mul(k, _I64(4))), _F32))]
        if self._form is Form.MIXED:
            pair = b.add(row, b.mul(k, _I64(8)))
            return [self._splat(self._load(b.add(pair, _I64(4 * place)), _F32)) for place in (1, 0)]
        word = self._splat(self._load(b.add(row, b.mul(k, _I64(4))), I32))
        if self._form is Form.BYTES:
            return [word]
        return self._halves(word) if self._widened else [b.bitcast(word, PAIRS)]

    def _add(self, total, weights, values):
        b = self._b
        if self._form is Form.BYTES:
            return add_bytes(b, total, weights, values)
        if self._widens() or self._form is Form.FP32:
            name = "llvm.fma.v16f32"
            operand = FLOATS
            fma = cgutils.get_or_insert_function(
                b.module, ir.FunctionType(FLOATS, [operand] * 3), name
            )
            return b.call(fma, [weights, values, total])
        return add_pairs(b, total, weights, values)

    def _widens(self) -> bool:
        return self._form is Form.MIXED or (self._form is Form.BF16 and self._widened)

    def _halves(self, pairs):
        """Return the second and the first bf16 of each lane as fp32."""
        b = self._b
        even = b.shl(pairs, ir.Constant(INTEGERS, [16] * LANES))
        odd = b.and_(pairs, ir.Constant(INTEGERS, [-65536] * LANES))
        return [b.bitcast(half, FLOATS) for half in (odd, even)]

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
