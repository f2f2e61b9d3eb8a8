"""Vectors of 16 lanes in LLVM code, and the CPU features that kernels are compiled for."""

from functools import cache

from llvmlite import ir
from numba.core import cgutils
from numba.core.registry import cpu_target

LANES = 16  # columns of a block
WORD_BYTES = 4  # bytes of a row of x in one step: 2 terms of bf16, 1 of fp32, or 4 bytes
BLOCK_STEP_BYTES = WORD_BYTES * LANES  # bytes of a block in one step

I8 = ir.IntType(8)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
FLOATS = ir.VectorType(ir.FloatType(), LANES)
INTEGERS = ir.VectorType(I32, LANES)


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
PAIRS = ir.VectorType(BFLOAT, 2 * LANES)


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


def add_pairs(b, total, weights, values):
    """Add the products of two pairs of bf16 to the sum in each lane.

    The pairs are vectors of any type of 64 bytes.
    """
    dot = cgutils.get_or_insert_function(
        b.module,
        ir.FunctionType(FLOATS, [FLOATS, PAIRS, PAIRS]),
        "llvm.x86.avx512bf16.dpbf16ps.512",
    )
    return b.call(dot, [total, b.bitcast(weights, PAIRS), b.bitcast(values, PAIRS)])


def in_all_lanes(b, value, count=LANES):
    """Return a vector with the value in all columns of a block, or in `count` lanes."""
    nothing = ir.Constant(ir.VectorType(value.type, count), ir.Undefined)
    first = ir.Constant(ir.VectorType(I32, count), [0] * count)
    return b.shuffle_vector(b.insert_element(nothing, value, I32(0)), nothing, first)


def add_bytes(b, total, weights, values):
    """Add four unsigned bytes times four signed bytes to the sum in each lane."""
    if {"+avx512vnni", "+avx512f"} <= cpu_features():
        kind = ir.VectorType(I8, 4 * LANES)
        dot = cgutils.get_or_insert_function(
            b.module,
            ir.FunctionType(INTEGERS, [INTEGERS, kind, kind]),
            "llvm.x86.avx512.vpdpbusd.512",
        )
        return b.call(dot, [total, b.bitcast(weights, kind), b.bitcast(values, kind)])
    if "+avx2" in cpu_features():
        return _add_bytes_by_pairs(b, total, weights, values)
    for place in range(4):
        weight = b.and_(b.lshr(weights, in_each_lane(8 * place)), in_each_lane(255))
        value = b.ashr(b.shl(values, in_each_lane(24 - 8 * place)), in_each_lane(24))
        total = b.add(total, b.mul(weight, value))
    return total


def _add_bytes_by_pairs(b, total, weights, values):
    """Add the products by AVX2, which multiplies pairs of 16 bits.

    Of each word the first and the third byte are a pair, and the second and the fourth.
    """
    half = LANES // 2
    kind, words = ir.VectorType(I16, 2 * half), ir.VectorType(I32, half)
    multiply = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(words, [kind] * 2), "llvm.x86.avx2.pmadd.wd"
    )
    eight = ir.Constant(ir.VectorType(I16, 2 * LANES), [8] * (2 * LANES))
    weights, values = (b.bitcast(each, eight.type) for each in (weights, values))
    even = b.lshr(b.shl(weights, eight), eight), b.ashr(b.shl(values, eight), eight)
    odd = b.lshr(weights, eight), b.ashr(values, eight)
    for factors in (even, odd):
        products = []
        for first in range(0, 2 * LANES, 2 * half):
            lanes = ir.Constant(ir.VectorType(I32, 2 * half), list(range(first, first + 2 * half)))
            products.append(
                b.call(multiply, [b.shuffle_vector(each, each, lanes) for each in factors])
            )
        total = b.add(total, b.shuffle_vector(*products, ir.Constant(INTEGERS, list(range(LANES)))))
    return total


def widened(b, shorts):
    """Return bf16, passed as 16 bits in each lane, as fp32."""
    return b.bitcast(b.shl(b.zext(shorts, INTEGERS), in_each_lane(16)), FLOATS)


def in_each_lane(number: int):
    """Return a constant vector of integers."""
    return ir.Constant(INTEGERS, [number] * LANES)
