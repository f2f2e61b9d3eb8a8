"""Linear layers over given weights, and the embedding's lookup.

On the host bf16 and fp32 weights are packed once, for the products of
`engine.kernels.host.linear.packed_linear`: one code for every number of rows. Other types take the
same order of sums in plain torch; a device has its library's product.
"""

from collections.abc import Sequence
from enum import StrEnum

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.contracts.model import Ranks
from engine.core.layer_range import EIGHTHS, Part, eighth
from engine.core.numerics import gelu, silu
from engine.kernels.host.codegen.compiled import Team, has_kernels
from engine.kernels.host.linear.packed_linear import PackedGroup, PackedWeight
from engine.kernels.plain_product import plain_product

SHARED_OUT_BYTES = 1 << 20  # that a rank would get of the others, if each were to add up all rows


def is_packed(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a layer over such a weight keeps a packed copy in its place."""
    return device.type == "cpu" and has_kernels(dtype)


class Linear:
    """y = x W^T + b. `weight` is [out, in]; `bias` [out] or None.

    Several weights that share their input (q, k, v) are fused by giving them all: their outputs
    follow each other in the last dimension.
    """

    def __init__(
        self,
        *weights: Tensor,
        biases: Sequence[Tensor] = (),
        in_bytes: bool = False,
        row_scales: Tensor | None = None,
    ) -> None:
        """`in_bytes`: keep the weights in eight bits, where they are packed. `row_scales`: see
        `PackedWeight`."""
        if biases and len(biases) != len(weights):
            raise ValueError(f"{len(weights)} fused weights need as many biases, got {len(biases)}")
        weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        bias = torch.cat(list(biases)) if biases else None
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.packed: PackedWeight | None = None
        if is_packed(weight.dtype, weight.device):
            self.packed = PackedWeight(
                weight, bias, Team(), in_bytes=in_bytes, row_scales=row_scales
            )
        else:
            self._weight, self._bias = weight.contiguous(), bias

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, in] in the weight's dtype. Returns [T, out]."""
        if self.packed is not None:
            return self.packed.multiply(x)
        if x.device.type != "cpu":
            return F.linear(x, self._weight, self._bias)
        product = plain_product(x, self._weight)
        return (product if self._bias is None else product + self._bias).to(x.dtype)

    def logits(self, x: Tensor) -> Tensor:
        """Likewise in fp32: on the host, without rounding to the weight's type and a copy in
        between."""
        if self.packed is not None:
            return self.packed.multiply(x, out_dtype=torch.float32)
        return self(x).float()

    def weight_rows(self, indices: Tensor) -> Tensor:
        """indices: [T] int64, on the host or where the weight lies. Returns those rows of the
        weight, [T, in]: a head that is tied to the embedding needs no copy of it. Not of weights in
        eight bits."""
        if self.packed is not None:
            return self.packed.rows(indices)
        return F.embedding(indices.to(self._weight.device), self._weight)


def owners_of(ids: Tensor, shares: Sequence[Part]) -> Tensor:
    """Return for each of `ids` [n], tokens or experts, the rank whose share it is. `shares`: by
    rank, none of them empty."""
    return torch.bucketize(ids, torch.tensor([share.stop for share in shares]), right=True)


class Homes:
    """Where rows are added up that all ranks need, of terms that lie on several: all rows on every
    rank while they are few, else equal shares of them, each on one rank, which the others have the
    sums of."""

    def __init__(self, ranks: Ranks | None, num_rows: int, num_bytes: int) -> None:
        """`num_bytes`: of a rank's terms of all rows."""
        self._ranks = ranks
        self.counts: list[int] | None = None  # of rows, by rank; None: all on every one
        self.own = slice(None)  # the rows of this rank
        if ranks is not None and (ranks.own.size - 1) * num_bytes >= SHARED_OUT_BYTES:
            each, more = divmod(num_rows, ranks.own.size)
            self.counts = [each + (rank < more) for rank in range(ranks.own.size)]
            start = sum(self.counts[: ranks.own.rank])
            self.own = slice(start, start + self.counts[ranks.own.rank])

    def everywhere(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """rows: this rank's. Returns all in this type."""
        if self.counts is None or self._ranks is None:
            return rows.to(dtype)
        every = torch.empty(sum(self.counts), *rows.shape[1:], dtype=dtype)
        every[self.own] = rows
        self._ranks.complete(every, self.counts)
        return every


class SummedLinear:
    """y = x W^T + b, of which each rank of the stage has a part of x and of W's columns. weight:
    [out, part of in], of eighths of the whole sum as many as a rank has
    (`engine.kernels.host.linear.packed_linear`): the ranks' sums are subtrees of the tree in which
    one process would add all of them, so the bits are the same."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        ranks: Ranks,
        *,
        num_terms: int,
        in_bytes: bool = False,
        row_scales: Tensor | None = None,
    ) -> None:
        """bias: [out] or None, the same on every rank. `num_terms`: of the whole sum. `in_bytes`,
        `row_scales`: see `Linear`."""
        self._num_segments, self._segment_terms = EIGHTHS // ranks.own.size, eighth(num_terms)
        self._bias = None if bias is None else bias.float()
        self._ranks = ranks
        self._packed: PackedWeight | None = None
        if is_packed(weight.dtype, weight.device):
            self._packed = PackedWeight(
                weight,
                None,
                Team(),
                num_segments=self._num_segments,
                segment_terms=self._segment_terms,
                in_bytes=in_bytes,
                row_scales=row_scales,
            )
        else:
            self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, part of in] in the weight's dtype. Returns [T, out], the same on every rank."""
        if self._packed is not None:
            part = self._packed.multiply(x, out_dtype=torch.float32)
        else:
            part = plain_product(
                x, self._weight, num_segments=self._num_segments, segment_terms=self._segment_terms
            )
        homes = Homes(self._ranks, len(part), part.nbytes)
        parts = (
            list(self._ranks.gather(part).view(self._ranks.own.size, *part.shape))
            if homes.counts is None
            else self._ranks.swap_shares(torch.split(part, homes.counts))
        )
        return homes.everywhere(self._sum(parts), x.dtype)

    def _sum(self, parts: Sequence[Tensor]) -> Tensor:
        """parts: by rank, [n, out] fp32 each, which are overwritten. Returns [n, out]."""
        while len(parts) > 1:
            parts = [
                first.add_(second) for first, second in zip(parts[::2], parts[1::2], strict=True)
            ]
        return parts[0] if self._bias is None else parts[0].add_(self._bias)


class Activation(StrEnum):
    """Of gated feed-forwards, by its name in configs."""

    SILU = "silu"
    GELU = "gelu_pytorch_tanh"


class GatedLinear:
    """act(gate(x)) * up(x), for silu on the host in one pass over x and rounded once."""

    def __init__(
        self, gate: Linear, up: Linear, *, activation: Activation = Activation.SILU
    ) -> None:
        self.gate, self.up, self._activation = gate, up, activation

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, in] in the weights' dtype. Returns [T, out]."""
        if self._activation is Activation.GELU:
            return gelu(self.gate(x)) * self.up(x)
        if self.gate.packed is not None and self.up.packed is not None:
            return self.gate.packed.multiply_gated(x, self.up.packed)
        return silu(self.gate(x)) * self.up(x)


class GroupedLinear:
    """Layers of one shape without biases, each for rows of its own (experts): on the host in one
    launch."""

    def __init__(self, layers: "Sequence[Linear | GatedLinear]") -> None:
        self._layers = layers
        self._group: PackedGroup | None = None
        gates = [layer.gate if isinstance(layer, GatedLinear) else layer for layer in layers]
        ups = [layer.up for layer in layers if isinstance(layer, GatedLinear)]
        self._out_features = gates[0].out_features
        packed, packed_ups = (
            [layer.packed for layer in each if layer.packed is not None] for each in (gates, ups)
        )
        if len(packed) == len(gates) and len(packed_ups) == len(ups):
            self._group = PackedGroup(packed, packed_ups, Team())

    def __call__(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """x: [T, in], of which the first counts[0] rows are the first layer's, and so on. Returns
        [T, out]."""
        if self._group is not None:
            return self._group.multiply(x, counts)
        parts = zip(self._layers, torch.split(x, list(counts)), strict=True)
        results = [layer(part) for layer, part in parts if len(part)]
        return torch.cat(results) if results else x.new_empty(0, self._out_features)


class HeadwiseLinear:
    """A matrix of its own for each head. weight: [heads, out, in]."""

    def __init__(self, weight: Tensor) -> None:
        self._out_features = weight.shape[1]
        self.packed: PackedWeight | None = None
        if is_packed(weight.dtype, weight.device):
            self.packed = PackedWeight(weight, None, Team())
        else:
            self._weight = weight.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, heads, in]. Returns [T, heads, out]."""
        if self.packed is not None:
            return self.packed.multiply(x).view(*x.shape[:2], self._out_features)
        if x.device.type != "cpu":
            return torch.bmm(x.transpose(0, 1), self._weight.transpose(1, 2)).transpose(0, 1)
        heads = zip(x.unbind(1), self._weight, strict=True)
        return torch.stack([plain_product(*head).to(x.dtype) for head in heads], dim=1)


def embed(token_ids: Tensor, table: Tensor) -> Tensor:
    """token_ids: [T] int64, on the host or already where `table` [vocab, hidden] lies. Returns [T,
    hidden]."""
    return F.embedding(token_ids.to(table.device), table)
