"""Products with packed weights on the host: one kernel and one order of sums for any row count.

Every output element is eight sums over eighths of K, added in a binary tree,
((0+1)+(2+3))+((4+5)+(6+7)), in fp32. An eighth is ceil(P/8) of the P pairs of terms of K; the last
ones have the rest. Processes that hold 4, 2 or 1 of the eighths each keep the order by adding their
parts as the tree does. The order of terms within a sum depends on the CPU's class of arithmetic:
one after the other (`dot.py`), or for bf16 in groups of 32 if the CPU has tiles (`tiles.py`).

Operations after the product are done before its single rounding: bias, silu(gate) * up of two
products, a residual. An element's bits depend on its row of x and of the residual and on its column
of the weights, and on nothing else.

8-bit weights multiply rows of x whose eighths are converted to 8-bit codes as well, and 4-bit
weights rows in groups of 8-bit codes; the rest is the same (`int8.py`, `int4.py`).
"""

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.core.numerics import WeightFormat
from engine.kernels.host.codegen import amx
from engine.kernels.host.codegen.compiled import (
    Team,
    launch_integers,
)
from engine.kernels.host.codegen.launch_recorder import keep_for_replays
from engine.kernels.host.codegen.tiles import is_tiled
from engine.kernels.host.codegen.vectors import LANES
from engine.kernels.host.linear.int4 import grouped_rows
from engine.kernels.host.linear.int4_weights import grouped_blocks
from engine.kernels.host.linear.int8 import CodedRows, coded, coded_blocks
from engine.kernels.host.linear.packed_linear_kernel import (
    SHARE_FIELDS,
    compiled_for,
    instructions,
    terms_of,
)
from engine.kernels.host.linear.packing import SEGMENTS, Segments, arranged, pack
from engine.kernels.host.linear.weight_memory import Allocate
from engine.kernels.host.linear.work_shares import share_out, share_out_tiles
from engine.kernels.host.tokens.row_ops import apart, rows_for_product
from runtime.errors import InternalError

REVISION = 6  # increment it if sums or roundings change, because then bits change


def arithmetic_class() -> str:
    """Return the class of arithmetic.

    Processes of one class compute the same bits from the same weights and inputs.
    """
    return f"{REVISION}-{instructions()}"


class PackedWeight:
    """A packed weight, copied from `weight` [N, K] or [H, N, K], bf16 or fp32 on the host.

    Attributes:
        blocks: the packed weight (`packing.pack`, `int8.coded_blocks`, `int4_weights.grouped_blocks`).
        bias: one value for each of the N or H * N outputs, or None.

    Args:
        num_segments: the number of eighths (4, 2 or 1) if the terms are a part of a longer sum. The
            result is then the subtree over these eighths.
        segment_terms: the number of terms of such an eighth.
        first_term: the place of the first term in the longer sum.
        weight_format: store a single matrix as codes of 8 or 4 bits.
        row_scales: [N], the rows' own scales for 8 bits; 0 for rows without one.
        allocate: the allocator of the packed weight.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        team: Team,
        *,
        num_segments: int = SEGMENTS,
        segment_terms: int | None = None,
        first_term: int = 0,
        weight_format: WeightFormat = WeightFormat.MODEL,
        row_scales: Tensor | None = None,
        allocate: Allocate = torch.empty,
    ) -> None:
        matrices = weight if weight.dim() == 3 else weight[None]
        self.shape = tuple(matrices.shape)
        self.dtype = weight.dtype
        tiled = is_tiled(terms_of(weight.dtype, weight_format))
        multiple = amx.STEPS if tiled else 1
        self.segments = Segments(
            matrices.shape[2],
            weight.dtype,
            multiple,
            num_segments,
            weight_format,
            segment_terms,
            first_term,
        )
        self.scales: Tensor | None = None
        if weight_format is WeightFormat.INT4:
            self.blocks = grouped_blocks(weight, self.segments, team, allocate)
        elif weight_format is WeightFormat.INT8:
            self.blocks, self.scales = coded_blocks(
                weight, self.segments, team, row_scales, allocate
            )
        else:
            self.blocks = pack(matrices, self.segments, team, allocate)
        self.bias = None if bias is None else bias.to(torch.float32, copy=True)
        self.addresses = _address(self.blocks), _address(self.bias), _address(self.scales)
        self._tiled, self._team = tiled, team

    def multiply(
        self, x: Tensor, *, residual: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """Compute x W^T + bias + residual.

        x is [M, K] and residual [M, N], in the weight's dtype. The result is [M, N] in `out_dtype`:
        the weight's dtype (the default) or fp32. With H matrices x is [M, H, K], and matrix h
        multiplies x[:, h]; residual and result are [M, H * N].
        """
        return self._launch(x, None, residual, out_dtype or self.dtype)

    def multiply_gated(self, x: Tensor, up: "PackedWeight") -> Tensor:
        """Compute silu(x W^T + bias) * (x U^T + bias of U) for `up`, U, of the same shape.

        The result is [M, N] in the weight's dtype.
        """
        if (up.shape, up.segments) != (self.shape, self.segments):
            raise InternalError(f"gate {self.shape} {self.dtype} beside up {up.shape} {up.dtype}")
        return self._launch(x, up, None, self.dtype)

    def rows(self, indices: Tensor) -> Tensor:
        """Return rows of a single matrix as they were before packing, [T, K]; indices is [T] int64.

        Raises:
            InternalError: the weights are stored as codes, so the original rows are lost.
        """
        if self.segments.weight_format.is_coded:
            raise InternalError(f"rows of weights in {self.segments.weight_format}")
        taken = self.blocks[0][indices // LANES, :, indices % LANES]
        return self.segments.restored(taken.flatten(1))

    def _launch(
        self, x: Tensor, up: "PackedWeight | None", residual: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        count, columns, terms = self.shape
        num_rows, headwise = x.shape[0], x.dim() == 3
        if x.dtype is not self.dtype or x.shape[1:] != (
            (terms,) if count == 1 and not headwise else (count, terms)
        ):
            raise InternalError(
                f"x {tuple(x.shape)} {x.dtype} for weights {self.shape} {self.dtype}"
            )
        if out_dtype not in (self.dtype, torch.float32):
            raise InternalError(f"results in {out_dtype} of weights in {self.dtype}")
        # A gated result is the input of a product.
        out = (
            torch.empty(num_rows, count * columns, dtype=out_dtype)
            if up is None
            else rows_for_product(num_rows, count * columns, out_dtype)
        )
        if not out.numel():
            return out
        x, codes = _operand(x, self.segments, self._team)
        num_blocks = self.blocks.shape[1]
        residual_at, residual_stride = 0, 0
        if residual is not None:
            residual = residual if residual.stride(1) == 1 else residual.contiguous()
            residual_at, residual_stride = residual.data_ptr(), residual.stride(0)
        w_up, bias_up, scales_up = (0, 0, 0) if up is None else up.addresses
        num_panels, num_threads = 1 if up is None else 2, torch.get_num_threads()
        if self._tiled and num_rows > amx.MAX_ROWS and not headwise:
            x = apart(x, self._team)
            work = share_out_tiles(
                num_rows, num_blocks, num_panels, x.stride(0) * x.itemsize, num_threads
            )
        else:
            work = share_out(num_rows, count, num_blocks, num_panels, num_threads, self.segments)
        launch_integers(
            compiled_for(self.dtype, weight_format=self.segments.weight_format),
            work.num_items,
            (
                *work.fields,
                num_rows,
                out.stride(0),
                columns,
                num_blocks,
                count,
                self.segments.count,
                self.segments.steps,
                x.data_ptr(),
                x.stride(0) * x.itemsize,
                x.stride(1) * x.itemsize if headwise else 0,
                0,
                self.addresses[0],
                w_up,
                self.segments.block_bytes,
                self.addresses[1],
                bias_up,
                residual_at,
                residual_stride,
                out.data_ptr(),
                out.itemsize,
                self.addresses[2],
                scales_up,
                *_scales_of(codes),
            ),
            self._team,
            scratch_bytes=work.scratch_bytes,
        )
        return out


class PackedGroup:
    """Matrices of one shape without biases (experts), computed in one launch.

    Each matrix multiplies its own rows.
    """

    def __init__(
        self, weights: Sequence[PackedWeight], ups: Sequence[PackedWeight], team: Team
    ) -> None:
        """Group the weights.

        `ups` has for each weight W one U of its shape, for silu(x W^T) * (x U^T), or is empty.
        """
        self._first = weights[0]
        if {(weight.shape, weight.segments) for weight in (*weights, *ups)} != {
            (self._first.shape, self._first.segments)
        }:
            raise InternalError("the matrices of a group have one shape and type")
        if any(weight.bias is not None for weight in (*weights, *ups)):
            raise InternalError("the matrices of a group have no biases")
        self._team = team
        self._kept = *weights, *ups  # the kernel has only their addresses
        self._addresses = [(weight.addresses[0], weight.addresses[2]) for weight in weights]
        self._ups = [(up.addresses[0], up.addresses[2]) for up in ups] or [(0, 0)] * len(weights)

    def multiply_runs(self, x: Tensor, runs: Sequence[tuple[int, int]]) -> Tensor:
        """Multiply x [M, K]; each of `runs` is a matrix and the number of its next rows.

        The result is [M, N] in the weights' dtype. Each row has the bits of a product alone.
        """
        counts = [count for _, count in runs]
        first, num_rows = self._first, len(x)
        _, columns, terms = first.shape
        if x.dtype is not first.dtype or x.shape[1] != terms or sum(counts) != num_rows:
            raise InternalError(
                f"x {tuple(x.shape)} {x.dtype} for {sum(counts)} rows of weights {first.shape}"
            )
        out = torch.empty(num_rows, columns, dtype=first.dtype)
        if not num_rows:
            return out
        table, start = array("q"), 0
        for matrix, count in runs:
            if count:
                (address, scales), (up, scales_up) = self._addresses[matrix], self._ups[matrix]
                table.extend((address, up, start, count, scales, scales_up))
                start += count
        x, codes = _operand(x, first.segments, self._team)
        num_blocks, is_gated = first.blocks.shape[1], self._ups[0][0]
        num_matrices = len(table) // SHARE_FIELDS
        work = share_out(
            max(counts),
            num_matrices,
            num_blocks,
            2 if is_gated else 1,
            torch.get_num_threads(),
            first.segments,
        )
        launch_integers(
            compiled_for(first.dtype, weight_format=first.segments.weight_format),
            work.num_items,
            (
                *work.fields,
                num_rows,
                columns,
                columns,
                num_blocks,
                num_matrices,
                first.segments.count,
                first.segments.steps,
                x.data_ptr(),
                x.stride(0) * x.itemsize,
                0,
                table.buffer_info()[0],
                0,
                is_gated,
                first.segments.block_bytes,
                0,
                0,
                0,
                0,
                out.data_ptr(),
                out.itemsize,
                0,
                0,
                *_scales_of(codes),
            ),
            self._team,
            scratch_bytes=work.scratch_bytes,
        )
        keep_for_replays(table)
        return out


def _operand(x: Tensor, segments: Segments, team: Team) -> tuple[Tensor, CodedRows | None]:
    """Return x in the form for weights in these segments, and its codes for 8-bit weights."""
    if segments.weight_format is WeightFormat.INT4:
        return grouped_rows(x, segments, team), None
    if segments.weight_format is WeightFormat.MODEL:
        lies_so = segments.are_whole and x.stride(-1) == 1
        return x if lies_so else arranged(x, segments, team), None
    codes = coded(x, segments, team)
    return codes.codes, codes


def _scales_of(codes: CodedRows | None) -> tuple[int, int]:
    return (0, 0) if codes is None else (codes.scales.data_ptr(), codes.offsets.data_ptr())


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
