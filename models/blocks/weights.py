"""How blocks get their weights: by name below a key prefix, into fresh memory, wherever they come
from.

Blocks request exactly the tensors they need, with the shapes they need, while they are built. So a
stage reads what its blocks request and nothing else, and a fused matrix is read straight into its
rows.
"""

import zlib
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.contracts.model import Ranks
from engine.core.layer_range import Part
from engine.core.numerics import HOST, Numerics
from models.blocks.linear import Activation, GatedLinear, Linear, SummedLinear, is_packed
from runtime.errors import InternalError

Rows = (
    int | Part | Sequence[Part]
)  # all of so many, one interval of them, or several one behind the other


def num_rows(rows: Rows) -> int:
    """How many they are."""
    if isinstance(rows, int):
        return rows
    return len(rows) if isinstance(rows, Part) else sum(map(len, rows))


class WeightSource(Protocol):
    """Named tensors of one stage. Names are the checkpoint's without a leading `model.`."""

    def has(self, name: str) -> bool: ...

    def read(self, name: str, out: Tensor, *, item: tuple[int, int] | None = None) -> None:
        """Fill `out` (contiguous, of any dtype, anywhere) with a tensor, or for `item` = (i, n)
        with entry i of n.

        A source notes a missing or wrong-shaped tensor and reports all of them at the end of the
        load.
        """
        ...

    def row_scales(self, name: str, *, item: int | None = None) -> Tensor | None:
        """[rows] fp32, if a matrix (an entry of a stack) is stored so; see
        `WeightEntry.row_scales`."""
        ...


class PartSource(WeightSource, Protocol):
    """Of which a rank keeps parts. All ranks of a stage read, and digest, the same tensors to the
    last byte."""

    def read_rows(
        self, name: str, out: Tensor, rows: Sequence[Part], columns: Part | None = None
    ) -> None:
        """Fill `out` with these rows of a tensor, one interval behind the other, and of each row
        the `columns`."""
        ...

    def skip(self, name: str, item: int | None = None) -> None:
        """A tensor, or entry `item` of a stack, is another rank's."""
        ...


class _Staging:
    """Memory that matrices are read into before they are packed, one after the other: memory of its
    own for each would be taken and given back in pieces that the allocator keeps."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def matrix(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """[rows, columns], valid until the next is requested."""
        num_bytes = rows * columns * dtype.itemsize
        if len(self._memory) < num_bytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # given back before more is taken
            self._memory = torch.empty(num_bytes, dtype=torch.uint8)
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
        staging: _Staging | None = None,
        parts: PartSource | None = None,
        ranks: Ranks | None = None,
        in_bytes: bool = False,
    ) -> None:
        """`device`: where the tensors lie, and so where blocks over them compute. `ranks` share the
        stage, where it has several: parts of tensors are then read from `parts`. `in_bytes`:
        projections keep eight bits of each weight."""
        self._source = source
        self._parts = parts
        self.ranks = ranks
        self._prefix = prefix
        self._dtype = dtype
        self._numerics = numerics
        self._staging = staging or _Staging()
        self.device = device
        self.in_bytes = in_bytes

    def at(self, part: str) -> "Weights":
        return self._but(prefix=f"{self._prefix}{part}.", ranks=self.ranks, in_bytes=self.in_bytes)

    def among(self, ranks: Ranks | None) -> "Weights":
        """The same for a layer that these ranks divide."""
        return self._but(prefix=self._prefix, ranks=ranks, in_bytes=self.in_bytes)

    def whole(self) -> "Weights":
        """The same for what is sensitive (routers, gates, the choice of keys): projections keep all
        bits."""
        return self._but(prefix=self._prefix, ranks=self.ranks, in_bytes=False)

    def _but(self, *, prefix: str, ranks: Ranks | None, in_bytes: bool) -> "Weights":
        return Weights(
            self._source,
            prefix=prefix,
            dtype=self._dtype,
            numerics=self._numerics,
            device=self.device,
            staging=self._staging,
            parts=self._parts,
            ranks=ranks,
            in_bytes=in_bytes,
        )

    def has(self, name: str) -> bool:
        return self._source.has(self._prefix + name)

    def tensor(
        self,
        name: str,
        *shape: int,
        dtype: torch.dtype | None = None,
        item: tuple[int, int] | None = None,
        rows: Rows | None = None,
    ) -> Tensor:
        """One tensor, or entry i of a stack of n for `item` = (i, n), or these rows. `dtype` is the
        model's unless given."""
        out = torch.empty(shape, dtype=dtype or self._dtype, device=self.device)
        if rows is None:
            self._source.read(self._prefix + name, out, item=item)
        else:
            self._read(name, out, rows)
        return out

    def skip(self, name: str, item: int | None = None) -> None:
        """A tensor, or an entry of a stack, that another rank keeps."""
        self._part_source.skip(self._prefix + name, item)

    def linear(
        self,
        *names: str,
        rows: Sequence[Rows],
        in_features: int,
        bias: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Linear:
        """One projection, or several with the same input fused into one: of `names[i]` the output
        rows `rows[i]`."""
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
        return self.linear_from(weight, scales, offsets)

    def summed(
        self, name: str, *, rows: int, terms: Part, bias: bool = False
    ) -> "Linear | SummedLinear":
        """A projection whose input is divided between the ranks: each has these terms of every
        sum."""
        if terms.is_whole:
            return self.linear(name, rows=(rows,), in_features=terms.total, bias=bias)
        if self.ranks is None:
            raise InternalError(f"{self._prefix}{name} is summed over ranks, and there are none")
        weight = self._passing(rows, len(terms), self._dtype)
        self._part_source.read_rows(
            f"{self._prefix}{name}.weight", weight, [Part.whole(rows)], terms
        )
        offsets = self.tensor(f"{name}.bias", rows) if bias else None
        return SummedLinear(
            weight,
            offsets,
            self.ranks,
            num_terms=terms.total,
            in_bytes=self.in_bytes,
            row_scales=self.row_scales(f"{name}.weight", rows),
        )

    def row_scales(self, name: str, rows: Rows, *, item: tuple[int, int] | None = None) -> Tensor:
        """[n] fp32 for n rows of a matrix, or of an entry of a stack: what projections in eight
        bits keep of how it is stored; 0 of rows that are coded anew."""
        parts = (
            [Part.whole(rows)]
            if isinstance(rows, int)
            else [rows]
            if isinstance(rows, Part)
            else rows
        )
        found = (
            self._source.row_scales(self._prefix + name, item=None if item is None else item[0])
            if self.in_bytes and self.device == HOST
            else None
        )
        if found is None or len(found) != parts[0].total:
            return torch.zeros(num_rows(rows))
        return torch.cat([found[part.start : part.stop] for part in parts])

    def _read(self, name: str, out: Tensor, rows: Rows) -> None:
        if isinstance(rows, int):
            self._source.read(self._prefix + name, out)
            return
        parts = [rows] if isinstance(rows, Part) else rows
        edges = [0, *(part.stop for part in parts)]
        if edges == [
            *(part.start for part in parts),
            parts[0].total,
        ]:  # one behind the other, they are all of it
            self._source.read(self._prefix + name, out)
        else:
            self._part_source.read_rows(self._prefix + name, out, parts)

    @property
    def _part_source(self) -> PartSource:
        if self._parts is None:
            raise InternalError(
                f"parts of {self._prefix}* are requested of a source of whole tensors"
            )
        return self._parts

    def linear_item(
        self, name: str, *, rows: int, in_features: int, item: tuple[int, int]
    ) -> Linear:
        """A projection over entry i of a stack of n for `item` = (i, n)."""
        weight = self._passing(rows, in_features, self._dtype)
        self._source.read(self._prefix + name, weight, item=item)
        return self.linear_from(weight, self.row_scales(name, rows, item=item))

    def gated_item(
        self, name: str, *, rows: int, in_features: int, item: tuple[int, int]
    ) -> GatedLinear:
        """Likewise; the gate's `rows` rows lie before those of what it gates."""
        weight = self._passing(2 * rows, in_features, self._dtype)
        self._source.read(self._prefix + name, weight, item=item)
        scales = self.row_scales(name, 2 * rows, item=item)
        return GatedLinear(
            *(
                self.linear_from(*half)
                for half in zip(weight.chunk(2), scales.chunk(2), strict=True)
            )
        )

    def _passing(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """A matrix for a `Linear`, which packs it where it can."""
        if is_packed(dtype, self.device):
            return self._staging.matrix(rows, columns, dtype)
        return torch.empty(rows, columns, dtype=dtype, device=self.device)

    def linear_from(self, weight: Tensor, row_scales: Tensor, bias: Tensor | None = None) -> Linear:
        """A projection over a weight [out, in] that was read already, and its `row_scales`
        [out]."""
        return Linear(
            weight,
            biases=() if bias is None else (bias,),
            in_bytes=self.in_bytes,
            row_scales=row_scales,
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
        """The activation of one projection times another, each with `rows` output rows."""
        return GatedLinear(
            *(
                self.linear(name, rows=(rows,), in_features=in_features, bias=bias)
                for name in (gate, up)
            ),
            activation=activation,
        )


class RandomWeights:
    """Repeatable random tensors of any name and shape: benchmarks of a model's shape without its
    checkpoint. The same on every device: they are drawn on the host."""

    def __init__(self, *, seed: int) -> None:
        self._seed = seed

    def has(self, name: str) -> bool:
        return (
            ".experts." not in name or name.rsplit(".", 1)[1] == "weight"
        )  # experts one by one, not stacked

    def read(self, name: str, out: Tensor, *, item: tuple[int, int] | None = None) -> None:
        if "norm" in name:
            out.fill_(1.0)
            return
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) ^ self._seed)
        # In fp32 whatever the type: torch draws the end of a tensor of odd size by another rule in
        # each.
        out.copy_(
            torch.empty(out.shape, dtype=torch.float32).normal_(
                0.0, out.shape[-1] ** -0.5, generator=generator
            )
        )

    def row_scales(self, name: str, *, item: int | None = None) -> None:
        """See `WeightSource.row_scales`."""

    def read_rows(
        self, name: str, out: Tensor, rows: Sequence[Part], columns: Part | None = None
    ) -> None:
        """See `PartSource.read_rows`."""
        shape = [rows[0].total, *out.shape[1:]]
        if columns is not None:
            shape[-1] = columns.total
        whole = torch.empty(shape, dtype=out.dtype)
        self.read(name, whole)
        kept = torch.cat([whole[part.start : part.stop] for part in rows])
        out.copy_(kept if columns is None else kept[..., columns.start : columns.stop])

    def skip(self, name: str, item: int | None = None) -> None:
        """See `PartSource.skip`."""
