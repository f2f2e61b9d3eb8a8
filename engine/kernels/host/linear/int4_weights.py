"""Coding of weights in four bits (`int4.py`).

A group has up to 32 weights v of a row. Its scale s and offset m are numbers of bf16, its codes

    q = (v - m) * (1 / s), rounded to the nearest integer, ties to even, from 0 to 15.

Candidates for s and m cover the range of the group by 8 to 16 steps, and one has m = -8 s as its
weight of the highest magnitude, as symmetric formats do. Each is replaced by the least squares fit to
its own codes,

    s = (n sum(v q) - sum(v) sum(q)) / (n sum(q q) - sum(q)^2),  m = (sum(v) - s sum(q)) / n.

The one with the least sum of squared errors is kept, or the fit to its codes if that has less. On
normal numbers this sum is 3 % above the least of many more candidates, 34 % below that of llama.cpp's
Q4_0 and 19 % below that of its Q4_1. Weights that were in four bits are on a grid of at most 15 steps,
even if a file's group is longer than 32 or cut in two: a candidate has these steps, or half of them.

Sums add the terms of a group in order, in fp32. If its range is below 2^-100, s and the codes are 0.
Numbers below 2^-110 are rounded to 0. If a weight is NaN or infinite, s and m are NaN.
"""

from functools import cache

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic
from torch import Tensor

from engine.kernels.host.codegen.compiled import (
    DONE,
    NEXT,
    STORED_AS,
    STRICT,
    STRICT_PART,
    Team,
    compile_kernel,
    count_up,
    launch_integers,
    pointer_to,
    record,
    rounded,
    take_seat,
    wide,
)
from engine.kernels.host.codegen.nibbles import (
    GROUP_BYTES,
    GROUP_TERMS,
    HEAD_BYTES,
    SCALES_BYTES,
)
from engine.kernels.host.codegen.softmax_blocks import to_bf16
from engine.kernels.host.codegen.strided_loops import counted, floats, size_of
from engine.kernels.host.codegen.vectors import FLOATS, INTEGERS, LANES, in_all_lanes, widened
from engine.kernels.host.linear.int4 import group_bounds
from engine.kernels.host.linear.int8 import MAGNITUDE, NO_NUMBER_BITS
from engine.kernels.host.linear.packing import Segments
from engine.kernels.host.linear.weight_memory import Allocate

# Numbers of steps of a group's range, and codes of its lowest weight, about the middle of all codes.
_COVERINGS = (
    (15, 0),
    (16, -0.5),
    *((num_steps, (15 - num_steps) // 2) for num_steps in range(14, 7, -1)),
)
_SYMMETRIC = 8.0  # the code of 0 in symmetric formats
_LEAST = 2.0**-100  # range of a group
_TINY = 2.0**-110  # below, CPUs differ in how they round to bf16
_HIGHEST_CODE = 15.0
_ROUNDER = 12582912.0  # 1.5 * 2^23: adding it rounds to an integer
_ZERO = np.float32(0.0)
_WORD_TERMS = 8
_SHIFTS = (0, 8, 16, 24, 4, 12, 20, 28)  # of the terms of a word
_F32 = ir.FloatType()
_I64 = ir.IntType(64)
# A thread's memory: the group's terms in 16 rows, then numbers of each row.
_MOST = GROUP_TERMS * LANES
_LEAST_VALUE = _MOST + LANES
_SCALE = _LEAST_VALUE + LANES
_INVERSE = _SCALE + LANES
_OFFSET = _INVERSE + LANES
_SCRATCH_BYTES = 4 * (_OFFSET + LANES)

_ARGUMENTS = record(
    "num_rows",
    "num_terms",
    "num_segments",
    "own_terms",
    "num_groups",
    "first_term",
    "weight",
    "row_bytes",
    "out",
)


def grouped_blocks(
    weight: Tensor, segments: Segments, team: Team, allocate: Allocate = torch.empty
) -> Tensor:
    """Code and pack weight [N, K], bf16 or fp32, where K is the number of the segments' terms.

    The result is [1, ceil(N/16), groups, GROUP_BYTES] uint8.
    """
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    num_blocks = -(-len(weight) // LANES)
    shape = 1, num_blocks, segments.count * segments.steps, GROUP_BYTES
    blocks = allocate(shape, dtype=torch.uint8)
    launch_integers(
        blocks_for(weight.dtype),
        num_blocks,
        (
            len(weight),
            segments.num_terms,
            segments.count,
            segments.own_terms,
            segments.steps,
            segments.first_term,
            weight.data_ptr(),
            weight.stride(0) * weight.itemsize,
            blocks.data_ptr(),
        ),
        team,
        scratch_bytes=_SCRATCH_BYTES,
    )
    return blocks


@cache
def blocks_for(dtype: torch.dtype):
    stored = STORED_AS[dtype]

    def work(pointer):
        _take_blocks(pointer, stored)

    return compile_kernel(work, _ARGUMENTS, f"nibbles_{stored.__name__}", numbers=STRICT)


@njit(**STRICT_PART)
def _take_blocks(pointer, stored):
    """Run one thread: code 16 rows at a time until no items are left."""
    a = carray(pointer, 1)[0]
    group_at = take_seat(pointer)
    while True:
        block = count_up(pointer, NEXT)
        if block >= a.num_items:
            return
        row = block * LANES
        rows = min(LANES, a.num_rows - row)
        out = a.out + block * a.num_segments * a.num_groups * GROUP_BYTES
        for segment in range(a.num_segments):
            for group in range(a.num_groups):
                start, count = group_bounds(a, segment, group)
                _read_group(
                    a.weight + row * a.row_bytes + start * size_of(stored),
                    a.row_bytes,
                    rows,
                    count,
                    group_at,
                    stored,
                )
                _choose(group_at, count)
                _write_group(group_at, out)
                out += GROUP_BYTES
        count_up(pointer, DONE)


@njit(**STRICT_PART)
def _read_group(weight, row_bytes, rows, count, group_at, stored):
    """Read `count` terms of `rows` rows as fp32, padded with zeros, and find their range."""
    group = floats(group_at)
    for place in range(GROUP_TERMS * LANES):
        group[place] = _ZERO
    for lane in range(rows):
        terms = pointer_to(weight + lane * row_bytes, stored)
        for term in range(count):
            group[term * LANES + lane] = wide(terms[term])
    for lane in range(LANES):
        most = group[lane]
        least = group[lane]
        highest_bits = np.uint32(0)
        for term in range(count):
            value = group[term * LANES + lane]
            most = value if value > most else most
            least = value if value < least else least
            highest_bits = max(
                highest_bits, np.uint32(np.float32(value).view(np.uint32) & MAGNITUDE)
            )
        is_number = highest_bits < NO_NUMBER_BITS
        group[_MOST + lane] = most if is_number else np.float32(np.nan)
        group[_LEAST_VALUE + lane] = least if is_number else np.float32(np.nan)


@intrinsic
def _choose(typing, group_at, count):
    """Choose the scales and offsets of 16 rows; one lane of a vector is one row."""

    def generate(context, b, signature, arguments):
        group = _Group(b, *arguments)
        first, *others = group.candidates()
        best = group.fit(*first)
        for each in others:
            best = _better(b, group.fit(*each), best)
        _, scale, offset = _better(b, group.fit(*best[1:]), best)
        for value, place in (
            (scale, _SCALE),
            (group.inverse(scale), _INVERSE),
            (offset, _OFFSET),
        ):
            b.store(value, _place(b, group.at, place), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _better(b, found, best):
    """Return the one with the smaller errors of each lane."""
    is_better = b.fcmp_ordered("<", found[0], best[0])
    return [b.select(is_better, *both) for both in zip(found, best, strict=True)]


class _Group:
    """Groups of 16 rows with `count` terms each, in LLVM code."""

    def __init__(self, b, at, count) -> None:
        self._b, self.at, self._count = b, at, count
        self._most, self._least = (
            b.load(_place(b, at, place), align=4) for place in (_MOST, _LEAST_VALUE)
        )
        self._range = b.fsub(self._most, self._least)
        self._is_flat = b.fcmp_ordered("<", self._range, _constant(_LEAST))

    def candidates(self):
        """Yield first scales and offsets."""
        b = self._b
        for num_steps, lowest in _COVERINGS:
            scale = self._scale(b.fmul(self._range, _constant(1.0 / num_steps)))
            yield scale, _to_bf16(b, b.fsub(self._least, b.fmul(scale, _constant(lowest))))
        is_most = b.fcmp_ordered(">", b.fadd(self._most, self._least), _constant(0.0))
        extreme = b.select(is_most, self._most, self._least)
        scale = self._scale(b.fmul(extreme, _constant(-1.0 / _SYMMETRIC)))
        yield scale, b.fmul(scale, _constant(-_SYMMETRIC))

    def fit(self, scale, offset):
        """Return the sums of squared errors of the fits to a candidate, and the fits."""
        b = self._b
        scale, offset = self._fitted(scale, offset)
        inverse = self.inverse(scale)

        def add_term(term, sums):
            value = self._value(term)
            code = _code(b, value, inverse, offset)
            error = b.fsub(value, b.fadd(b.fmul(code, scale), offset))
            return [b.fadd(sums[0], b.fmul(error, error))]

        (errors,) = counted(b, self._count, [_constant(0.0)], add_term)
        return errors, scale, offset

    def inverse(self, scale):
        b = self._b
        return b.select(self._is_flat, _constant(0.0), b.fdiv(_constant(1.0), scale))

    def _fitted(self, scale, offset):
        """Return the least squares fit to the codes of a scale and an offset."""
        b = self._b
        inverse = self.inverse(scale)

        def add_term(term, sums):
            value = self._value(term)
            code = _code(b, value, inverse, offset)
            terms = value, code, b.fmul(value, code), b.fmul(code, code)
            return [b.fadd(*each) for each in zip(sums, terms, strict=True)]

        values, codes, products, squares = counted(b, self._count, [_constant(0.0)] * 4, add_term)
        count = in_all_lanes(b, b.sitofp(self._count, _F32))
        spread = b.fsub(b.fmul(count, squares), b.fmul(codes, codes))
        slope = b.fdiv(b.fsub(b.fmul(count, products), b.fmul(values, codes)), spread)
        is_number = b.fcmp_ordered("ord", scale, scale)
        is_fit = b.and_(is_number, b.fcmp_ordered(">", spread, _constant(0.0)))
        fit = b.select(is_fit, self._scale(slope), scale)
        shift = b.fdiv(b.fsub(values, b.fmul(fit, codes)), count)
        has_terms = b.fcmp_ordered(">", count, _constant(0.0))
        is_shifted = b.and_(is_number, has_terms)
        return fit, b.select(is_shifted, _to_bf16(b, shift), offset)

    def _scale(self, value):
        """Return a scale in bf16, or 0 if the weights are equal."""
        b = self._b
        return b.select(self._is_flat, _constant(0.0), _to_bf16(b, value))

    def _value(self, term):
        b = self._b
        return b.load(_place(b, self.at, b.mul(term, _I64(LANES))), align=4)


def _to_bf16(b, value):
    """Return fp32 rounded to bf16; what is hardly more than 0 becomes 0."""
    is_tiny = b.and_(
        b.fcmp_ordered("<", value, _constant(_TINY)), b.fcmp_ordered(">", value, _constant(-_TINY))
    )
    return b.select(is_tiny, _constant(0.0), widened(b, to_bf16(b, value)))


def _code(b, value, inverse, offset):
    """Return the nearest code as fp32."""
    quotient = b.fmul(b.fsub(value, offset), inverse)
    code = b.fsub(b.fadd(quotient, _constant(_ROUNDER)), _constant(_ROUNDER))
    for order, end in ((">", 0.0), ("<", _HIGHEST_CODE)):
        code = b.select(b.fcmp_ordered(order, code, _constant(end)), code, _constant(end))
    return code


@intrinsic
def _replace_by_codes(typing, group_at):
    """Replace the terms of 16 rows by their codes, in int32."""

    def generate(context, b, signature, arguments):
        (group_at,) = arguments
        inverse, offset = (
            b.load(_place(b, group_at, place), align=4) for place in (_INVERSE, _OFFSET)
        )

        def code_term(term, _):
            place = _place(b, group_at, b.mul(term, _I64(LANES)))
            code = b.fptosi(_code(b, b.load(place, align=4), inverse, offset), INTEGERS)
            b.store(code, b.bitcast(place, INTEGERS.as_pointer()), align=4)
            return []

        counted(b, _I64(GROUP_TERMS), [], code_term)
        return context.get_dummy_value()

    return types.void(types.int64), generate


def _place(b, group_at, index):
    """Return a pointer to the vector of 16 lanes that begins with number `index` of a group."""
    index = _I64(index) if isinstance(index, int) else index
    return b.inttoptr(b.add(group_at, b.mul(index, _I64(4))), FLOATS.as_pointer())


def _constant(value):
    return ir.Constant(FLOATS, [value] * LANES)


@njit(**STRICT_PART)
def _write_group(group_at, out):
    """Write the scales, offsets and codes of 16 rows as a group of `nibbles.py`."""
    group = floats(group_at)
    scales = pointer_to(out, np.uint16)
    offsets = pointer_to(out + SCALES_BYTES, np.uint16)
    for lane in range(LANES):
        scales[lane] = rounded(group[_SCALE + lane], np.uint16)
        offsets[lane] = rounded(group[_OFFSET + lane], np.uint16)
    _replace_by_codes(group_at)
    terms = pointer_to(group_at, np.int32)
    words = pointer_to(out + HEAD_BYTES, np.int32)
    for word in range(GROUP_TERMS // _WORD_TERMS):
        for lane in range(LANES):
            bits = np.int32(0)
            for place in range(_WORD_TERMS):
                code = terms[(_WORD_TERMS * word + place) * LANES + lane]
                bits |= code << _SHIFTS[place]
            words[word * LANES + lane] = bits
