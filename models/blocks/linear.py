"""Linear layers over given weights, and the embedding lookup.

On the host, bf16 and fp32 weights are packed once for the products of
`engine.kernels.host.linear.packed_linear`, which use the same code for every number of rows. Other
dtypes use the same order of sums in plain torch. A device uses the product of its library.
"""

from collections.abc import Sequence
from enum import StrEnum

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.contracts.model import Ranks
from engine.core.layer_range import EIGHTHS, Part, eighth
from engine.core.numerics import WeightFormat, gelu, silu
from engine.kernels.host.codegen.compiled import Team, has_kernels
from engine.kernels.host.linear.packed_linear import PackedGroup, PackedWeight
from engine.kernels.host.linear.weight_memory import Allocate
from engine.kernels.host.tokens.gating import gate_rows
from engine.kernels.plain_product import plain_product
from models.blocks.low_rank import LowRankUpdates, index_tensor, untouched_rows

# The bytes that a rank would receive from the others if each added up all rows.
SHARED_OUT_BYTES = 1 << 20


def is_packed(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a layer replaces such a weight by a packed copy."""
    return device.type == "cpu" and has_kernels(dtype)


class Linear:
    """A linear layer y = x W^T + b. `weight` is [out, in], `bias` [out] or None.

    Several weights with the same input (q, k, v) are fused. Their outputs are concatenated in the
    last dimension.
    """

    def __init__(
        self,
        *weights: Tensor,
        biases: Sequence[Tensor] = (),
        weight_format: WeightFormat = WeightFormat.MODEL,
        row_scales: Tensor | None = None,
        updates: LowRankUpdates | None = None,
        allocate: Allocate = torch.empty,
    ) -> None:
        """Create the layer.

        Packed weights are kept in `weight_format`. For `row_scales` and `allocate` see
        `PackedWeight`. `updates` are those of adapters.
        """
        if biases and len(biases) != len(weights):
            raise ValueError(f"{len(weights)} fused weights need as many biases, got {len(biases)}")
        weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        bias = torch.cat(list(biases)) if biases else None
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.updates = updates
        self.packed: PackedWeight | None = None
        if is_packed(weight.dtype, weight.device):
            self.packed = PackedWeight(
                weight,
                bias,
                Team(),
                weight_format=weight_format,
                row_scales=row_scales,
                allocate=allocate,
            )
        else:
            self._weight = weight.contiguous()
            self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, out] for x [T, in] in the weight's dtype."""
        product = self._product(x)
        return product if self.updates is None else self.updates.add(product, x)

    def _product(self, x: Tensor) -> Tensor:
        """Return the product without updates."""
        if self.packed is not None:
            return self.packed.multiply(x)
        if x.device.type != "cpu":
            return F.linear(x, self._weight, self._bias)
        product = plain_product(x, self._weight)
        return (product if self._bias is None else product + self._bias).to(x.dtype)

    def logits(self, x: Tensor) -> Tensor:
        """Return the product in fp32.

        On the host, it is not rounded to the weight's dtype in between.
        """
        if self.packed is None:
            return self(x).float()
        product = self.packed.multiply(x, out_dtype=torch.float32)
        return product if self.updates is None else self.updates.add(product, x)

    def weight_rows(self, indices: Tensor) -> Tensor:
        """Return rows of the weight, [T, in], so that a tied head needs no copy of the embedding.

        `indices` is [T] int64, on the host or on the weight's device. Coded weights do not support
        it.
        """
        if self.packed is not None:
            return self.packed.rows(indices)
        return F.embedding(indices.to(self._weight.device), self._weight)


def owners_of(ids: Tensor, shares: Sequence[Part]) -> Tensor:
    """Return for each of `ids` [n], tokens or experts, the rank that owns it.

    `shares` are by rank, none of them empty.
    """
    return torch.bucketize(ids, torch.tensor([share.stop for share in shares]), right=True)


class Homes:
    """The ranks that add up rows, if all ranks need the sums and the terms are on several ranks.

    A few rows are added up on every rank. Otherwise each rank adds up an equal share of the rows
    and sends the sums to the others.
    """

    def __init__(self, ranks: Ranks | None, num_rows: int, num_bytes: int) -> None:
        """Divide `num_rows` rows. `num_bytes` is the size of one rank's terms of all rows."""
        self._ranks = ranks
        self.counts: list[int] | None = None  # of rows, by rank; None if every rank has all rows
        self.own = slice(None)  # this rank's rows
        if ranks is not None and (ranks.own.size - 1) * num_bytes >= SHARED_OUT_BYTES:
            each, more = divmod(num_rows, ranks.own.size)
            self.counts = [each + (rank < more) for rank in range(ranks.own.size)]
            start = sum(self.counts[: ranks.own.rank])
            self.own = slice(start, start + self.counts[ranks.own.rank])

    def everywhere(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return all rows in `dtype`, given this rank's rows."""
        if self.counts is None or self._ranks is None:
            return rows.to(dtype)
        every = torch.empty(sum(self.counts), *rows.shape[1:], dtype=dtype)
        every[self.own] = rows
        self._ranks.complete(every, self.counts)
        return every


class SummedLinear:
    """A linear layer y = x W^T + b whose sums are divided between the ranks of a stage.

    Each rank has a part of x and of W's columns. `weight` is [out, part of in], and covers the
    rank's share of the eighths of the whole sum (`engine.kernels.host.linear.packed_linear`). The
    sums of the ranks are subtrees of the tree in which one process would add all terms, so the bits
    are the same.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        ranks: Ranks,
        *,
        terms: Part,
        weight_format: WeightFormat = WeightFormat.MODEL,
        row_scales: Tensor | None = None,
        updates: LowRankUpdates | None = None,
        allocate: Allocate = torch.empty,
    ) -> None:
        """Create this rank's part.

        `bias` is [out] or None, the same on every rank. `terms` are this rank's of the whole sum.
        `weight_format`, `row_scales`, `updates` and `allocate` are as in `Linear`.
        """
        self._updates = updates
        self._num_segments, self._segment_terms = EIGHTHS // ranks.own.size, eighth(terms.total)
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
                first_term=terms.start,
                weight_format=weight_format,
                row_scales=row_scales,
                allocate=allocate,
            )
        else:
            self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, out], the same on every rank, for x [T, part of in] in the weight's dtype."""
        product = self._product(x)
        return product if self._updates is None else self._updates.add(product, x)

    def _product(self, x: Tensor) -> Tensor:
        """Return the product without updates."""
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
        """Return the sum [n, out] of parts by rank, [n, out] fp32 each, which are overwritten."""
        while len(parts) > 1:
            parts = [
                first.add_(second) for first, second in zip(parts[::2], parts[1::2], strict=True)
            ]
        return parts[0] if self._bias is None else parts[0].add_(self._bias)


class GatheredLinear:
    """A linear layer y = x W^T + b of which each rank of a stage has a part of x and of y.

    Every rank gets all of x, and computes whole sums. So the bits are those of one process,
    wherever x is divided.
    """

    def __init__(
        self, own_rows: Linear, ranks: Ranks, *, inputs: Sequence[Part], outputs: Sequence[Part]
    ) -> None:
        """Create this rank's part, which has `own_rows` of W and b.

        inputs[r] and outputs[r] are the values of x and of y that rank r has.
        """
        self._own_rows = own_rows
        self._ranks = ranks
        self._num_inputs = [len(part) for part in inputs]
        self._num_outputs = [len(part) for part in outputs]

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, out], the same on every rank, for x [T, part of in] in the weight's dtype."""
        whole = gather_columns(self._ranks, x, self._num_inputs)
        return gather_columns(self._ranks, self._own_rows(whole), self._num_outputs)


def gather_columns(ranks: Ranks, columns: Tensor, counts: Sequence[int]) -> Tensor:
    """Return all ranks' columns by rank, [T, sum(counts)], given this rank's."""
    return ranks.gather(columns.T.contiguous(), counts).T.contiguous()


class Activation(StrEnum):
    """The activations of gated feed-forwards, by their names in configs."""

    SILU = "silu"
    GELU = "gelu_pytorch_tanh"


class GatedLinear:
    """The gated product act(gate(x)) * up(x).

    On the host, silu takes one pass over x and rounds once.
    """

    def __init__(
        self, gate: Linear, up: Linear, *, activation: Activation = Activation.SILU
    ) -> None:
        self.gate = gate
        self.up = up
        self._activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, out] for x [T, in] in the weights' dtype.

        The fused product has no place for updates. Rows with updates take the two products apart.
        """
        if self._activation is Activation.GELU:
            return gelu(self.gate(x)) * self.up(x)
        packed, packed_up = self.gate.packed, self.up.packed
        if packed is None or packed_up is None:
            return silu(self.gate(x)) * self.up(x)
        updates = [each for each in (self.gate.updates, self.up.updates) if each is not None]
        rest = untouched_rows(updates, len(x)) if updates else None
        if rest is None:
            return packed.multiply_gated(x, packed_up)
        out = gated(self.gate(x), self.up(x))
        if len(rest):
            rows = index_tensor(rest)
            out[rows] = packed.multiply_gated(x[rows], packed_up)
        return out


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up of two [T, K], as an input of a product."""
    if gate.device.type == "cpu" and has_kernels(gate.dtype):
        return gate_rows(gate, up, Team())
    return silu(gate) * up


class GroupedLinear:
    """Layers of equal shape without biases, each for its own rows (experts).

    On the host they run in one launch.
    """

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
        """Return [T, out] for x [T, in].

        The first counts[0] rows of x belong to the first layer, and so on.
        """
        return self.multiply_runs(x, list(enumerate(counts)))

    def multiply_runs(self, x: Tensor, runs: Sequence[tuple[int, int]]) -> Tensor:
        """Return [T, out] for x [T, in]; each of `runs` is a layer and its number of rows."""
        if self._group is not None:
            return self._group.multiply_runs(x, runs)
        parts = zip(runs, torch.split(x, [count for _, count in runs]), strict=True)
        results = [self._layers[place](part) for (place, _), part in parts if len(part)]
        return torch.cat(results) if results else x.new_empty(0, self._out_features)


class HeadwiseLinear:
    """One matrix per head. `weight` is [heads, out, in]."""

    def __init__(self, weight: Tensor, *, allocate: Allocate = torch.empty) -> None:
        self._out_features = weight.shape[1]
        self.packed: PackedWeight | None = None
        if is_packed(weight.dtype, weight.device):
            self.packed = PackedWeight(weight, None, Team(), allocate=allocate)
        else:
            self._weight = weight.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, heads, out] for x [T, heads, in]."""
        if self.packed is not None:
            return self.packed.multiply(x).view(*x.shape[:2], self._out_features)
        if x.device.type != "cpu":
            return torch.bmm(x.transpose(0, 1), self._weight.transpose(1, 2)).transpose(0, 1)
        heads = zip(x.unbind(1), self._weight, strict=True)
        return torch.stack([plain_product(*head).to(x.dtype) for head in heads], dim=1)


def embed(token_ids: Tensor, table: Tensor) -> Tensor:
    """Return the embeddings [T, hidden] of token_ids [T] int64.

    The ids are on the host or on the device of `table` [vocab, hidden].
    """
    return F.embedding(token_ids.to(table.device), table)
