"""Layout of weights and of rows of x for the products of the host.

The values of 16 rows of weights are interleaved, so that one load is 16 columns of y. They are
divided into eight segments of k of equal length, or fewer if a process holds only a part of k. Rows
of x have the same segments.
"""

from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import torch
import torch.nn.functional as F
from numba import carray, njit
from torch import Tensor

from engine.core.layer_range import EIGHTHS, eighth
from engine.core.numerics import WeightFormat
from engine.kernels.host.codegen.compiled import (
    DONE,
    NEXT,
    PART,
    STORED_AS,
    Team,
    compile_kernel,
    count_up,
    launch,
    launch_integers,
    pointer_to,
    record,
    take_seat,
)
from engine.kernels.host.codegen.lane_shuffles import turn
from engine.kernels.host.codegen.nibbles import GROUP_BYTES, GROUP_TERMS, ROW_GROUP_BYTES
from engine.kernels.host.codegen.strided_loops import size_of
from engine.kernels.host.codegen.vectors import BLOCK_STEP_BYTES, LANES, WORD_BYTES
from engine.kernels.host.linear.weight_memory import Allocate

SEGMENTS = EIGHTHS

_ARGUMENTS = record(
    "num_blocks",
    "num_rows",
    "num_words",
    "num_segments",
    "segment_words",
    "segment_steps",
    "matrix_words",
    "row_words",
    "weight",
    "out",
)
_ROWS = record(
    "num_rows", "num_terms", "row_stride", "num_segments", "own_terms", "filled_terms", "x", "out"
)
_ITEM_ROWS = 16


@dataclass(frozen=True)
class Segments:
    """The division of `num_terms` terms of a sum into `count` segments.

    There are eight segments, or fewer if the terms are a part of a longer sum, in which the first one
    has the place `first_term`. A segment has `segment_terms` terms. By default it is an eighth of a sum
    of which the `count` segments are an equal part; the last segments have the rest. It is padded with
    zeros to a multiple of `multiple` steps. A step is a word of a row's terms, or a group of terms in
    four bits (`nibbles.py`).
    """

    num_terms: int
    dtype: torch.dtype
    multiple: int
    count: int = SEGMENTS
    weight_format: WeightFormat = WeightFormat.MODEL
    segment_terms: int | None = None
    first_term: int = 0

    @cached_property
    def step_terms(self) -> int:
        """Return the number of terms of a step."""
        if self.weight_format is WeightFormat.INT4:
            return GROUP_TERMS
        return WORD_BYTES // (1 if self.weight_format is WeightFormat.INT8 else self.dtype.itemsize)

    @cached_property
    def row_step_bytes(self) -> int:
        """Return the bytes of a row of x in one step."""
        is_grouped = self.weight_format is WeightFormat.INT4
        return ROW_GROUP_BYTES if is_grouped else WORD_BYTES

    @cached_property
    def own_terms(self) -> int:
        """Return the number of terms of a segment without padding."""
        if self.segment_terms is not None:
            return self.segment_terms
        return eighth(self.num_terms * SEGMENTS // self.count)

    @cached_property
    def own_steps(self) -> int:
        """Return the number of steps of a segment without padding.

        Groups in four bits begin at multiples of 32 of the longer sum, as in files, or with a
        segment. So they may be one more than the terms would fill.
        """
        if self.weight_format is not WeightFormat.INT4 or not self.own_terms:
            return -(-self.own_terms // self.step_terms)
        starts = [self.first_term + index * self.own_terms for index in range(self.count)]
        return max(
            (start + self.own_terms - 1) // GROUP_TERMS - start // GROUP_TERMS + 1
            for start in starts
        )

    @cached_property
    def steps(self) -> int:
        """Return the number of steps of a segment."""
        return -(-self.own_steps // self.multiple) * self.multiple

    @cached_property
    def block_bytes(self) -> int:
        """Return the bytes of 16 rows of the weights."""
        is_grouped = self.weight_format is WeightFormat.INT4
        return self.count * self.steps * (GROUP_BYTES if is_grouped else BLOCK_STEP_BYTES)

    @cached_property
    def are_whole(self) -> bool:
        """Return whether the segments have no padding."""
        return self.num_terms == self.count * self.steps * self.step_terms

    @cached_property
    def terms(self) -> int:
        """Return the number of terms of a segment with padding."""
        return self.steps * self.step_terms

    def restored(self, x: Tensor) -> Tensor:
        """Return [..., num_terms] without padding, the inverse of `arranged`."""
        cut = x.view(*x.shape[:-1], self.count, self.terms)[..., : self.own_terms]
        return cut.flatten(-2)[..., : self.num_terms]


def arranged(x: Tensor, segments: Segments, team: Team) -> Tensor:
    """Return x [..., K], bf16 or fp32, in segments, as [..., count * terms of a segment].

    K is the number of the segments' terms. The result is a view if it needs no padding, otherwise a
    copy padded with zeros.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    if segments.are_whole:
        return x
    rows = x.reshape(-1, segments.num_terms)
    out = torch.empty(*x.shape[:-1], segments.count * segments.terms, dtype=x.dtype)
    launch_integers(
        arranges_for(x.dtype),
        -(-len(rows) // _ITEM_ROWS),
        (
            len(rows),
            segments.num_terms,
            rows.stride(0),
            segments.count,
            segments.own_terms,
            segments.terms,
            rows.data_ptr(),
            out.data_ptr(),
        ),
        team,
    )
    return out


@cache
def arranges_for(dtype: torch.dtype):
    stored = STORED_AS[dtype]

    def work(pointer):
        _arrange_rows(pointer, stored)

    return compile_kernel(work, _ROWS, f"arrange_rows_{stored.__name__}")


@njit(**PART)
def _arrange_rows(pointer, stored):
    """Run one thread: arrange a few rows at a time until no items are left."""
    a = carray(pointer, 1)[0]
    size = size_of(stored)
    while True:
        item = count_up(pointer, NEXT)
        if item >= a.num_items:
            return
        for row in range(item * _ITEM_ROWS, min((item + 1) * _ITEM_ROWS, a.num_rows)):
            for segment in range(a.num_segments):
                start = min(segment * a.own_terms, a.num_terms)
                count = min(a.own_terms, a.num_terms - start)
                x = pointer_to(a.x + (row * a.row_stride + start) * size, stored)
                out = pointer_to(
                    a.out + (row * a.num_segments + segment) * a.filled_terms * size, stored
                )
                for term in range(count):
                    out[term] = x[term]
                for term in range(count, a.filled_terms):
                    out[term] = 0
        count_up(pointer, DONE)


def pack(
    weight: Tensor,
    segments: Segments,
    team: Team,
    allocate: Allocate = torch.empty,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Pack weight [H, N, K], bf16 or fp32, on the host; K is the number of the segments' terms.

    The result is [H, ceil(N/16), S, 16, 2] bf16 or [H, ceil(N/16), S, 16] fp32 for the S steps of
    all segments, padded with zeros. It is written to `out` if given, which must be contiguous.
    """
    num_matrices, num_rows, num_terms = weight.shape
    odd = num_terms % segments.step_terms
    source = F.pad(weight, (0, odd)) if odd else weight
    strides = [stride * source.element_size() for stride in source.stride()]
    if strides[2] != source.element_size() or strides[0] % WORD_BYTES or strides[1] % WORD_BYTES:
        source = source.contiguous()
        strides = [stride * source.element_size() for stride in source.stride()]
    num_blocks = -(-num_rows // LANES)
    shape = (num_matrices, num_blocks, segments.count * segments.steps, LANES)
    if out is None:
        out = allocate((*shape, 2) if weight.dtype is torch.bfloat16 else shape, dtype=weight.dtype)
    if out.numel():
        launch(
            compiled(),
            _ARGUMENTS,
            team,
            num_items=num_matrices * num_blocks,
            scratch_bytes=LANES * 8,
            num_blocks=num_blocks,
            num_rows=num_rows,
            num_words=source.shape[2] // segments.step_terms,
            num_segments=segments.count,
            segment_words=segments.own_steps,
            segment_steps=segments.steps,
            matrix_words=strides[0] // WORD_BYTES,
            row_words=strides[1] // WORD_BYTES,
            weight=source,
            out=out,
        )
    return out


@cache
def compiled():
    def work(pointer):
        _take_blocks(pointer)

    return compile_kernel(work, _ARGUMENTS, "pack")


@njit(**PART)
def _take_blocks(pointer):
    """Run one thread: pack 16 rows at a time until no items are left."""
    a = carray(pointer, 1)[0]
    weight = pointer_to(a.weight, np.uint32)
    rows_at = take_seat(pointer)
    addresses = carray(pointer_to(rows_at, np.int64), LANES)  # addresses of 16 rows' first words
    for lane in range(LANES):
        addresses[lane] = a.weight + lane * a.row_words * WORD_BYTES
    while True:
        item = count_up(pointer, NEXT)
        if item >= a.num_items:
            return
        row = item % a.num_blocks * LANES
        first = item // a.num_blocks * a.matrix_words + row * a.row_words
        count = min(LANES, a.num_rows - row)
        for segment in range(a.num_segments):
            start = min(segment * a.segment_words, a.num_words)
            words = min(a.segment_words, a.num_words - start)
            out_at = a.out + (item * a.num_segments + segment) * a.segment_steps * BLOCK_STEP_BYTES
            _turn(
                weight, rows_at, first + start, a.row_words, words, count, out_at, a.segment_steps
            )
        count_up(pointer, DONE)


@njit(**PART)
def _turn(weight, rows_at, first, row_words, words, count, out_at, steps):
    """Transpose `words` words of `count` rows, one row per lane, padded with zeros.

    16 rows are processed by 16 words at a time.
    """
    whole = words - words % LANES if count == LANES else 0
    for word in range(0, whole, LANES):
        turn(
            rows_at,
            (first + word) * WORD_BYTES,
            out_at + word * BLOCK_STEP_BYTES,
            BLOCK_STEP_BYTES,
        )
    out = carray(pointer_to(out_at, np.uint32), (steps, LANES))
    for word in range(whole, words):
        for lane in range(count):
            out[word, lane] = weight[first + lane * row_words + word]
        for lane in range(count, LANES):
            out[word, lane] = 0
    for word in range(words, steps):
        for lane in range(LANES):
            out[word, lane] = 0
