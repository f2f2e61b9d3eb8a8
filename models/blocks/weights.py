"""Access to weights for blocks: by name under a key prefix, into fresh memory, from any source.

Blocks request exactly the tensors that they need, in the shapes that they need, while they are
built. So a stage reads only what its blocks request, and a fused matrix is read straight into its
rows.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Protocol

import torch
from torch import Tensor

from engine.contracts.model import Ranks
from engine.core.huge_pages import map_memory
from engine.core.layer_range import Part
from engine.core.numerics import HOST, Numerics, WeightFormat
from engine.kernels.host.linear.weight_memory import Allocate, WeightMemory
from models.blocks.adapted import (
    Arranged,
    ExpertProjection,
    Projection,
    Rows,
    StageAdapters,
    intervals,
    num_rows,
    stacked,
)
from models.blocks.linear import (
    Activation,
    GatedLinear,
    GatheredLinear,
    Linear,
    SummedLinear,
    is_packed,
)
from models.blocks.low_rank import LowRankUpdates
from runtime.errors import InternalError


class WeightSource(Protocol):
    """Named tensors of one stage. Names are the checkpoint's without a leading `model.`."""

    def has(self, name: str) -> bool: ...

    def read(self, name: str, out: Tensor, *, item: tuple[int, int] | None = None) -> None:
        """Fill `out` with a tensor, or for `item` = (i, n) with entry i of n.

        `out` is contiguous, of any dtype and on any device. A source records missing and misshapen
        tensors, and reports all of them at the end of the load.
        """
        ...

    def row_scales(self, name: str, *, item: int | None = None) -> Tensor | None:
        """Return [rows] fp32 scales of a matrix or of a stack's entry, or None.

        See `WeightEntry.row_scales`.
        """
        ...


class PartSource(WeightSource, Protocol):
    """A source of parts of tensors.

    All ranks of a stage read and digest the same tensors to the last byte.
    """

    def read_rows(
        self, name: str, out: Tensor, rows: Sequence[Part], columns: Part | None = None
    ) -> None:
        """Fill `out` with intervals of rows of a tensor, and of each row `columns`."""
        ...

    def skip(self, name: str, item: int | None = None) -> None:
        """Read a tensor, or entry `item` of a stack, for the digest only: another rank keeps it."""
        ...


class _PackingMemory:
    """Reused memory for matrices that are read before they are packed, one after another.

    Separate memory for each matrix, or memory of the heap, would be freed in pieces that the
    allocator keeps. `packed` is the memory of the packed ones.
    """

    def __init__(self) -> None:
        self.packed = WeightMemory()
        self._memory = torch.empty(0, dtype=torch.uint8)

    def matrix(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Return memory for [rows, columns], valid until the next request."""
        num_bytes = rows * columns * dtype.itemsize
        if len(self._memory) < num_bytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # released before more is reserved
            self._memory = torch.frombuffer(map_memory(num_bytes), dtype=torch.uint8)
        return self._memory[:num_bytes].view(dtype).view(rows, columns)


class Weights:
    """The tensors whose names start with `prefix`."""

    def __init__(
        self,
        source: WeightSource,
        *,
        prefix: str,
        dtype: torch.dtype,
        numerics: Numerics,
        device: torch.device = HOST,
        staging: _PackingMemory | None = None,
        parts: PartSource | None = None,
        ranks: Ranks | None = None,
        weight_format: WeightFormat = WeightFormat.MODEL,
        adapters: StageAdapters | None = None,
    ) -> None:
        """Create a view of a source.

        `device` holds the tensors, and blocks over them compute there. `ranks` are those that share
        the stage, if it has several; parts of tensors are then read from `parts`. Projections keep
        their weights in `weight_format` and take their updates from `adapters`.
        """
        self.adapters = adapters or StageAdapters()
        self._source = source
        self._parts = parts
        self.ranks = ranks
        self.prefix = prefix
        self._dtype = dtype
        self._numerics = numerics
        self._staging = staging or _PackingMemory()
        self.device = device
        self.weight_format = weight_format

    @property
    def allocate(self) -> Allocate:
        """Return the allocator of packed weights."""
        return self._staging.packed.empty

    def at(self, part: str) -> "Weights":
        found = copy(self)
        found.prefix = f"{self.prefix}{part}."
        return found

    def among(self, ranks: Ranks | None) -> "Weights":
        """Return the same tensors for a layer that these ranks divide."""
        found = copy(self)
        found.ranks = ranks
        return found

    def whole(self) -> "Weights":
        """Return the same tensors for sensitive layers, whose projections keep all bits.

        These are routers, gates and the selection of keys.
        """
        found = copy(self)
        found.weight_format = WeightFormat.MODEL
        return found

    def for_head(self) -> "Weights":
        """Return the same tensors for a projection to the vocabulary (`WeightFormat.of_head`)."""
        found = copy(self)
        found.weight_format = self.weight_format.of_head
        return found

    def without_adapters(self) -> "Weights":
        """Return the same tensors for projections that no adapter can update."""
        found = copy(self)
        found.adapters = StageAdapters()
        return found

    def has(self, name: str) -> bool:
        return self._source.has(self.prefix + name)

    def tensor(
        self,
        name: str,
        *shape: int,
        dtype: torch.dtype | None = None,
        item: tuple[int, int] | None = None,
        rows: Rows | None = None,
    ) -> Tensor:
        """Return a tensor, its entry i of n for `item` = (i, n), or these rows.

        The default `dtype` is the model's.
        """
        out = torch.empty(shape, dtype=dtype or self._dtype, device=self.device)
        if rows is None:
            self._source.read(self.prefix + name, out, item=item)
        else:
            self._read(name, out, rows)
        return out

    def skip(self, name: str, item: int | None = None) -> None:
        """Skip a tensor, or an entry of a stack, that another rank keeps."""
        self._part_source.skip(self.prefix + name, item)

    def linear(
        self,
        *names: str,
        rows: Sequence[Rows],
        in_features: int,
        bias: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Linear:
        """Return one projection, or several with the same input fused into one.

        Of `names[i]` it has the output rows `rows[i]`.
        """
        counts = [num_rows(each) for each in rows]
        weight = self._passing(sum(counts), in_features, dtype or self._dtype)
        offsets = torch.empty(sum(counts), dtype=self._dtype, device=self.device) if bias else None
        scales = torch.cat(
            [
                self.row_scales(f"{name}.weight", each)
                for name, each in zip(names, rows, strict=True)
            ]
        )
        start = 0
        for name, each, count in zip(names, rows, counts, strict=True):
            self._read(f"{name}.weight", weight[start : start + count], each)
            if offsets is not None:
                self._read(f"{name}.bias", offsets[start : start + count], each)
            start += count
        own = dict(zip(names, rows, strict=True))
        return self.linear_from(
            weight, scales, offsets, updates=self.updates(own, in_features, dtype=dtype)
        )

    def updates(
        self,
        parts: Mapping[str, Rows],
        in_features: int,
        *,
        dtype: torch.dtype | None = None,
        terms: Part | None = None,
        arranged: Arranged = stacked,
    ) -> LowRankUpdates | None:
        """Return the adapters' updates of a projection; the arguments are those of `Projection`."""
        return self.adapters.updates(
            Projection(self.prefix, parts, in_features, terms, arranged),
            dtype=dtype or self._dtype,
            device=self.device,
            ranks=self.ranks,
        )

    def updates_of_experts(self, projection: ExpertProjection) -> LowRankUpdates | None:
        """Return the adapters' updates of a projection of experts."""
        return self.adapters.updates_of_experts(projection, dtype=self._dtype, device=self.device)

    def summed(
        self, name: str, *, rows: int, terms: Sequence[Part], bias: bool = False
    ) -> "Linear | SummedLinear | GatheredLinear":
        """Return a projection whose input is divided between the ranks.

        terms[r] are the terms of every sum that rank r has. If they are not eighths of the sum,
        the ranks exchange them, and each computes whole sums of its part of the rows.
        """
        if len(terms) == 1:
            return self.linear(name, rows=(rows,), in_features=terms[0].total, bias=bias)
        if self.ranks is None:
            raise InternalError(f"{self.prefix}{name} is summed over ranks, but there are none")
        own_rank = self.ranks.own
        if any(
            each.eighths(part.total) != part
            for each, part in zip(own_rank.every, terms, strict=True)
        ):
            outputs = own_rank.parts(rows, f"rows of {self.prefix}{name}")
            own_rows = self.linear(
                name, rows=(outputs[own_rank.rank],), in_features=terms[0].total, bias=bias
            )
            return GatheredLinear(own_rows, self.ranks, inputs=terms, outputs=outputs)
        own = terms[own_rank.rank]
        weight = self._passing(rows, len(own), self._dtype)
        self._part_source.read_rows(f"{self.prefix}{name}.weight", weight, [Part.whole(rows)], own)
        offsets = self.tensor(f"{name}.bias", rows) if bias else None
        return SummedLinear(
            weight,
            offsets,
            self.ranks,
            terms=own,
            weight_format=self.weight_format,
            row_scales=self.row_scales(f"{name}.weight", rows),
            updates=self.updates({name: rows}, own.total, terms=own),
            allocate=self.allocate,
        )

    def row_scales(self, name: str, rows: Rows, *, item: tuple[int, int] | None = None) -> Tensor:
        """Return scales [n] fp32 for n rows of a matrix, or of an entry of a stack.

        Projections in eight bits keep the stored codes of these rows. A scale of 0 means that the
        row is coded again.
        """
        parts = intervals(rows)
        found = (
            self._source.row_scales(self.prefix + name, item=None if item is None else item[0])
            if self.weight_format is WeightFormat.INT8 and self.device == HOST
            else None
        )
        if found is None or len(found) != parts[0].total:
            return torch.zeros(num_rows(rows))
        return torch.cat([found[part.start : part.stop] for part in parts])

    def _read(self, name: str, out: Tensor, rows: Rows) -> None:
        if isinstance(rows, int):
            self._source.read(self.prefix + name, out)
            return
        parts = [rows] if isinstance(rows, Part) else rows
        edges = [0, *(part.stop for part in parts)]
        # Consecutive parts from the first row to the last are the whole matrix.
        if edges == [
            *(part.start for part in parts),
            parts[0].total,
        ]:
            self._source.read(self.prefix + name, out)
        else:
            self._part_source.read_rows(self.prefix + name, out, parts)

    @property
    def _part_source(self) -> PartSource:
        if self._parts is None:
            raise InternalError(
                f"parts of {self.prefix}* were requested from a source of whole tensors"
            )
        return self._parts

    def linear_item(
        self, name: str, *, rows: int, in_features: int, item: tuple[int, int]
    ) -> Linear:
        """Return a projection over entry i of a stack of n, for `item` = (i, n)."""
        weight = self._passing(rows, in_features, self._dtype)
        self._source.read(self.prefix + name, weight, item=item)
        return self.linear_from(weight, self.row_scales(name, rows, item=item))

    def gated_item(
        self, name: str, *, rows: int, in_features: int, item: tuple[int, int]
    ) -> GatedLinear:
        """Return a gated projection over an entry of a stack.

        The gate's `rows` rows come before those that it gates.
        """
        weight = self._passing(2 * rows, in_features, self._dtype)
        self._source.read(self.prefix + name, weight, item=item)
        scales = self.row_scales(name, 2 * rows, item=item)
        return GatedLinear(
            *(
                self.linear_from(*half)
                for half in zip(weight.chunk(2), scales.chunk(2), strict=True)
            )
        )

    def _passing(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Return memory for a matrix that a `Linear` packs if it can."""
        if is_packed(dtype, self.device):
            return self._staging.matrix(rows, columns, dtype)
        return torch.empty(rows, columns, dtype=dtype, device=self.device)

    def linear_from(
        self,
        weight: Tensor,
        row_scales: Tensor,
        bias: Tensor | None = None,
        *,
        updates: LowRankUpdates | None = None,
    ) -> Linear:
        """Return a projection over a weight [out, in] in memory, with `row_scales` [out]."""
        return Linear(
            weight,
            biases=() if bias is None else (bias,),
            weight_format=self.weight_format,
            row_scales=row_scales,
            updates=updates,
            allocate=self.allocate,
        )

    def gated(
        self,
        gate: str,
        up: str,
        *,
        rows: Rows,
        in_features: int,
        bias: bool = False,
        activation: Activation = Activation.SILU,
    ) -> GatedLinear:
        """Return the activation of one projection times another, each with `rows` output rows."""
        return GatedLinear(
            *(
                self.linear(name, rows=(rows,), in_features=in_features, bias=bias)
                for name in (gate, up)
            ),
            activation=activation,
        )
