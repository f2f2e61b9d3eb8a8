"""Products of four-bit weights and eight-bit rows in LLVM code, a group of 32 terms at a time.

A weight is code * s_w + m, with a code of 0 to 15. A group of 16 columns has GROUP_BYTES: 16 s_w and
16 m in bf16, then four words for each column. Word j has the terms 8j to 8j + 3 in the low halves of
its bytes and the next four in the high halves. A group of a row of x has ROW_GROUP_BYTES: its scale
s_x in fp32, X = s_x * (the sum of its codes) in fp32, and 32 codes in int8.

    sum += (sum over the group of x_code * w_code) * (s_w * s_x)
    sum += m * X

The inner sum is of integers, so exact on every CPU. The product of the scales is rounded, and each of
the two multiply-adds.
"""

from functools import partial

from llvmlite import ir
from numba.core import cgutils

from engine.kernels.host.codegen.strided_loops import counted
from engine.kernels.host.codegen.vectors import (
    FLOATS,
    I8,
    I16,
    I32,
    INTEGERS,
    LANES,
    add_bytes,
    cpu_features,
    in_all_lanes,
    widened,
)

GROUP_TERMS = 32
SCALES_BYTES = 2 * LANES  # of 16 columns
HEAD_BYTES = 2 * SCALES_BYTES  # s_w and m
GROUP_BYTES = HEAD_BYTES + GROUP_TERMS * LANES // 2
ROW_HEAD_BYTES = 8  # s_x and X
ROW_GROUP_BYTES = ROW_HEAD_BYTES + GROUP_TERMS

_WORD_TERMS = 8
_HALF_TERMS = 4
_WORDS = GROUP_TERMS // _WORD_TERMS
_WORD_BYTES = 4 * LANES  # of 16 columns
_I64 = ir.IntType(64)
_F32 = ir.FloatType()
_LOW_HALVES = 0x0F0F0F0F
# Vectors of AVX2, each of 8 columns.
_BYTES = ir.VectorType(I8, 32)
_SHORTS = ir.VectorType(I16, 16)
_INTEGERS = ir.VectorType(I32, 8)


def add_group(b, weights, rows, totals):
    """Return the totals, one vector per row, after one group.

    `weights` is the address of a group of 16 columns, `rows` are those of a group of each row.
    """
    is_paired = "+avx2" in cpu_features() and "+avx512vnni" not in cpu_features()
    sums = (_sums_by_pairs if is_paired else _sums)(b, weights, rows)
    scales, offsets = (
        widened(b, _load(b, weights, ir.VectorType(I16, LANES), at=at)) for at in (0, SCALES_BYTES)
    )
    fma = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(FLOATS, [FLOATS] * 3), "llvm.fma.v16f32"
    )
    results = []
    for whole, row, total in zip(sums, rows, totals, strict=True):
        scale, codes = (in_all_lanes(b, _load(b, row, _F32, at=at)) for at in (0, 4))
        product = b.call(fma, [b.sitofp(whole, FLOATS), b.fmul(scales, scale), total])
        results.append(b.call(fma, [offsets, codes, product]))
    return results


def _sums(b, weights, rows):
    """Return the rows' sums of integers, each in one vector."""
    sums = [ir.Constant(INTEGERS, None) for _ in rows]
    for word in range(_WORDS):
        (codes,) = _words(b, weights, INTEGERS, at=word * _WORD_BYTES)
        for half in range(2):
            at = ROW_HEAD_BYTES + word * _WORD_TERMS + half * _HALF_TERMS
            part = _half(b, codes, half)
            sums = [
                add_bytes(b, total, part, in_all_lanes(b, _load(b, row, I32, at=at)))
                for total, row in zip(sums, rows, strict=True)
            ]
    return sums


def _sums_by_pairs(b, weights, rows):
    """Return the rows' sums of integers by AVX2.

    Pairs of products are added in 16 bits, which hold 8 pairs of at most 2 * 15 * 127.
    """
    pairs = [ir.Constant(_SHORTS, None)] * (2 * len(rows))
    if len(rows) == 1:
        for word in range(_WORDS):
            pairs = _add_pairs(b, weights, rows, _I64(word), pairs)
    else:
        # Without a loop, LLVM loads the values of all words first, and has no registers left. It
        # would unroll it, so an assembly without instructions hides the number of rounds.
        hidden = ir.InlineAsm(ir.FunctionType(_I64, [_I64]), "", "=r,0", side_effect=False)
        rounds = b.call(hidden, [_I64(_WORDS)])
        pairs = counted(b, rounds, pairs, partial(_add_pairs, b, weights, rows))
    pair_up = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(_INTEGERS, [_SHORTS] * 2), "llvm.x86.avx2.pmadd.wd"
    )
    ones = ir.Constant(_SHORTS, [1] * _SHORTS.count)
    lanes = ir.Constant(INTEGERS, list(range(LANES)))
    halves = [b.call(pair_up, [each, ones]) for each in pairs]
    return [
        b.shuffle_vector(low, high, lanes)
        for low, high in zip(halves[::2], halves[1::2], strict=True)
    ]


def _add_pairs(b, weights, rows, word, pairs):
    """Return the rows' sums of pairs after one more word.

    Each row has two vectors, for the first and the last 8 columns.
    """
    multiply = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(_SHORTS, [_BYTES] * 2), "llvm.x86.avx2.pmadd.ub.sw"
    )
    codes = _words(b, b.add(weights, b.mul(word, _I64(_WORD_BYTES))), _INTEGERS)
    for half in range(2):
        parts = [b.bitcast(_half(b, each, half), _BYTES) for each in codes]
        products = []
        for row in rows:
            terms = b.add(row, b.mul(word, _I64(_WORD_TERMS)))
            four = _load(b, terms, I32, at=ROW_HEAD_BYTES + half * _HALF_TERMS)
            values = b.bitcast(in_all_lanes(b, four, _INTEGERS.count), _BYTES)
            products += [b.call(multiply, [part, values]) for part in parts]
        pairs = [b.add(*each) for each in zip(pairs, products, strict=True)]
    return pairs


def _words(b, weights, vector, *, at=0):
    """Return a word of each of 16 columns in vectors of this type."""
    return [
        _load(b, weights, vector, at=HEAD_BYTES + at + 4 * lane)
        for lane in range(0, LANES, vector.count)
    ]


def _half(b, codes, half):
    """Return the codes in the low (0) or high (1) halves of all bytes."""
    constant = partial(ir.Constant, codes.type)
    low = b.lshr(codes, constant([4] * codes.type.count)) if half else codes
    return b.and_(low, constant([_LOW_HALVES] * codes.type.count))


def _load(b, address, kind, *, at=0):
    return b.load(b.inttoptr(b.add(address, _I64(at)), kind.as_pointer()), align=2)
