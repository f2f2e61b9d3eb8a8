"""The adapters of a stage, and the construction of its projections' low-rank updates."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.contracts.model import Ranks
from engine.core.layer_range import Part
from engine.kernels.host.linear.low_rank import UpFactor
from models.blocks.linear import GroupedLinear, Linear, SummedLinear
from models.blocks.low_rank import (
    AdapterRows,
    FactorSource,
    LowRankFactors,
    LowRankUpdates,
    Product,
    Runs,
    UpdateGroup,
)
from runtime.errors import ConfigError

# All rows of a matrix by number, one interval, or several intervals one after another.
Rows = int | Part | Sequence[Part]
Arranged = Callable[..., Tensor]


def intervals(rows: Rows) -> Sequence[Part]:
    """Return the intervals of rows."""
    if isinstance(rows, int):
        return [Part.whole(rows)]
    return [rows] if isinstance(rows, Part) else rows


def num_rows(rows: Rows) -> int:
    """Return the number of rows."""
    return sum(map(len, intervals(rows)))


def stacked(*matrices: Tensor) -> Tensor:
    """Return the matrices one after another."""
    return torch.cat(matrices)


@dataclass(frozen=True)
class Projection:
    """A projection, or several with the same input in one product, as a rank has it.

    Attributes:
        prefix: the prefix of the parts' names.
        parts: the rows of each part that this rank has, by name.
        in_features: the terms of the whole sum.
        terms: the terms of this rank, if the ranks divide the sum.
        arranged: the order of the parts' rows in the product.
    """

    prefix: str
    parts: Mapping[str, Rows]
    in_features: int
    terms: Part | None = None
    arranged: Arranged = stacked

    @cached_property
    def order(self) -> NDArray[np.int64]:
        """Return for each output of the product its row among the rows of all parts."""
        counts = [num_rows(rows) for rows in self.parts.values()]
        numbers = torch.split(torch.arange(sum(counts))[:, None], counts)
        return self.arranged(*numbers)[:, 0].numpy()


@dataclass(frozen=True)
class ExpertProjection:
    """A projection of every expert of a layer, or several with the same input in one product.

    Attributes:
        prefix: the prefix of the experts' names, which are numbers.
        stack: the parameter in which files may have all of it for all experts.
        parts: the number of rows of each part, by name.
        in_features: the terms of a sum.
        own: the experts of this rank.
        is_swapped: whether PEFT takes the inputs of the stacked parameter for its outputs. It matters
            if neither the factors nor their shapes tell.
    """

    prefix: str
    stack: str
    parts: Mapping[str, int]
    in_features: int
    own: Part
    is_swapped: bool = False


class StageAdapters:
    """The adapters of a stage. They come and go while it serves.

    `load` may run in any thread, one at a time. The others are for the thread that runs the stage.
    """

    def __init__(self, *, has_any: bool = False) -> None:
        """Create the adapters of a stage; without `has_any` it can never have one."""
        self.rows = AdapterRows()
        self._has_any = has_any
        self._projections: list[_AdaptedProjection | _AdaptedExperts] = []

    def load(self, adapter: str, source: FactorSource) -> None:
        """Load an adapter. Rows of later batches may have it.

        Raises:
            ConfigError: it does not fit the model, or its file is damaged. Nothing has changed then.
        """
        found = [(each, each.factors(source)) for each in self._projections]
        source.finish()
        for each, factors in found:
            if factors is not None:
                each.loaded.include(adapter, factors)
        self.rows.add(adapter)

    def drop(self, adapter: str) -> None:
        """Release an adapter that no batch has any more."""
        self.rows.remove(adapter)
        for each in self._projections:
            each.loaded.exclude(adapter)

    def updates(
        self,
        projection: Projection,
        *,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks | None,
    ) -> LowRankUpdates | None:
        """Return the updates of a projection, or None if it can never have any.

        The parts of a projection share one product, with A of the parts one below another. `ranks`
        are those that divide its sum, if there are several.
        """
        if not self._has_any:
            return None
        loaded = _Loaded(LowRankUpdates(self.rows))
        self._projections.append(_AdaptedProjection(projection, dtype, device, ranks, loaded))
        return loaded.updates

    def updates_of_experts(
        self, projection: ExpertProjection, *, dtype: torch.dtype, device: torch.device
    ) -> LowRankUpdates | None:
        """Return the updates of a projection of experts, or None if it can never have any."""
        if not self._has_any:
            return None
        loaded = _Loaded(LowRankUpdates(self.rows))
        self._projections.append(_AdaptedExperts(projection, dtype, device, loaded))
        return loaded.updates


@dataclass(frozen=True)
class _AdapterFactors:
    """One adapter's factors of a projection, or of each expert's: A of all parts, and B by part."""

    rank: int
    downs: tuple[Linear | SummedLinear, ...]
    ups: tuple[tuple[UpFactor, ...], ...]


class _Loaded:
    """The adapters that update a projection."""

    def __init__(self, updates: LowRankUpdates) -> None:
        self.updates = updates
        self._by_adapter: dict[str, _AdapterFactors] = {}

    def include(self, adapter: str, factors: _AdapterFactors) -> None:
        self._by_adapter[adapter] = factors
        self._regroup()

    def exclude(self, adapter: str) -> None:
        if self._by_adapter.pop(adapter, None) is not None:
            self._regroup()

    def _regroup(self) -> None:
        """Group the adapters in an order that does not depend on the order of their loads.

        Ranks exchange the sums of one adapter after another, and a rank that joined again has
        loaded them in another order than the others.
        """
        by_rank: dict[int, dict[str, _AdapterFactors]] = {}
        for adapter, factors in sorted(self._by_adapter.items(), key=lambda each: each[0]):
            by_rank.setdefault(factors.rank, {})[adapter] = factors
        self.updates.groups = [
            UpdateGroup(
                tuple(members),
                _product([down for each in members.values() for down in each.downs]),
                tuple(ups for each in members.values() for ups in each.ups),
            )
            for _, members in sorted(by_rank.items(), key=lambda each: each[0])
        ]


@dataclass(frozen=True)
class _AdaptedProjection:
    """A projection with the factors of the adapters that target it."""

    projection: Projection
    dtype: torch.dtype
    device: torch.device
    ranks: Ranks | None
    loaded: _Loaded

    def factors(self, source: FactorSource) -> _AdapterFactors | None:
        """Return the factors of an adapter, or None if it does not target this projection.

        Raises:
            ConfigError: they do not have the shape of the projection.
        """
        by_name = {
            name: factors
            for name in self.projection.parts
            if (factors := source.factors(self.projection.prefix + name)) is not None
        }
        if not by_name:
            return None
        down, ups = _joined(source.name, self.projection, by_name, self.dtype, self.device)
        return _AdapterFactors(len(down), (self._down(down),), (ups,))

    def _down(self, matrix: Tensor) -> Linear | SummedLinear:
        """Return the layer of A [r, in], or of this rank's terms of it."""
        terms = self.projection.terms
        if terms is None or terms.is_whole or self.ranks is None:
            return Linear(matrix)
        own = matrix[:, terms.start : terms.stop].contiguous()
        return SummedLinear(own, None, self.ranks, terms=terms)


@dataclass(frozen=True)
class _AdaptedExperts:
    """A projection of experts with the factors of the adapters that target it."""

    projection: ExpertProjection
    dtype: torch.dtype
    device: torch.device
    loaded: _Loaded

    def factors(self, source: FactorSource) -> _AdapterFactors | None:
        """Return the factors of an adapter, or None if it does not target these experts.

        Raises:
            ConfigError: they do not have the shape of the projection, or some experts have none.
        """
        own = self.projection.own
        names = dict.fromkeys((self.projection.stack, *self.projection.parts))
        found = list[list[tuple[LowRankFactors, int]]]()
        num_others = 0
        for expert in range(own.total):
            if own.start <= expert < own.stop:
                found.append(self._factors_of(source, f"{self.projection.prefix}{expert}."))
            else:
                skipped = [
                    source.skip(f"{self.projection.prefix}{expert}.{name}") for name in names
                ]
                num_others += any(skipped)
        num_found = sum(map(bool, found)) + num_others
        if num_found not in (0, own.total):
            raise ConfigError(
                f"adapter {source.name!r} updates {num_found} of the {own.total} experts of "
                f"{self.projection.prefix}{'/'.join(names)}: all or none must be",
                field="adapters",
            )
        if not num_found:
            return None
        rank = max(sum(len(factors.down) for factors, _ in parts) for parts in found)
        downs, ups = zip(*(self._joined(parts, rank) for parts in found), strict=True)
        return _AdapterFactors(rank, downs, ups)

    def _factors_of(self, source: FactorSource, prefix: str) -> list[tuple[LowRankFactors, int]]:
        """Return the factors of an expert's parts, each with its first output."""
        widths = self.projection.parts
        stacked = source.factors(prefix + self.projection.stack)
        if stacked is not None and self._is_swapped(stacked):
            stacked = LowRankFactors(stacked.up.T, stacked.down.T)
        first_outputs = accumulate(widths.values(), initial=0)
        found = (
            [(prefix + self.projection.stack, stacked, sum(widths.values()), 0)]
            if stacked is not None
            else [
                (prefix + name, source.factors(prefix + name), width, first)
                for (name, width), first in zip(widths.items(), first_outputs, strict=False)
            ]
        )
        for name, factors, width, _ in found:
            if factors is not None:
                _check_shapes(source.name, name, factors, width, self.projection.in_features)
        return [(factors, first) for _, factors, _, first in found if factors is not None]

    def _is_swapped(self, factors: LowRankFactors) -> bool:
        """Return whether PEFT has taken inputs for outputs, as some versions do for some families."""
        if factors.is_swapped is not None:
            return factors.is_swapped
        given = factors.up.shape[0], factors.down.shape[1]
        expected = sum(self.projection.parts.values()), self.projection.in_features
        return self.projection.is_swapped if given == given[::-1] else given == expected[::-1]

    def _joined(
        self, parts: Sequence[tuple[LowRankFactors, int]], rank: int
    ) -> tuple[Linear, tuple[UpFactor, ...]]:
        """Return the layer of A of all parts, with rows of zeros up to a rank, and B by part."""
        down = torch.zeros(rank, self.projection.in_features)
        ups = list[UpFactor]()
        end = 0
        for factors, first_output in parts:
            start, end = end, end + len(factors.down)
            down[start:end] = factors.down
            matrix = factors.up.T.to(self.device, self.dtype).contiguous()
            ups.append(UpFactor(matrix, start, first_output))
        return Linear(down.to(self.device, self.dtype)), tuple(ups)


def _joined(
    adapter: str,
    projection: Projection,
    by_name: Mapping[str, LowRankFactors],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, tuple[UpFactor, ...]]:
    """Return A of all parts one below another, [r, in], and B by part."""
    order = projection.order
    downs = list[Tensor]()
    ups = list[UpFactor]()
    first_row = 0
    for name, rows in projection.parts.items():
        parts = intervals(rows)
        count = num_rows(rows)
        factors = by_name.get(name)
        if factors is not None:
            _check_shapes(
                adapter, projection.prefix + name, factors, parts[0].total, projection.in_features
            )
            own = torch.cat([factors.up[part.start : part.stop] for part in parts])
            first_term = sum(len(down) for down in downs)
            places = np.flatnonzero((order >= first_row) & (order < first_row + count))
            for outputs in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1):
                taken = own[torch.from_numpy(order[outputs] - first_row)]
                matrix = taken.T.to(device, dtype).contiguous()
                ups.append(UpFactor(matrix, first_term, int(outputs[0])))
            downs.append(factors.down)
        first_row += count
    return torch.cat(downs).to(device, dtype), tuple(ups)


def _check_shapes(
    adapter: str, module: str, factors: LowRankFactors, out_features: int, in_features: int
) -> None:
    given = factors.up.shape[0], factors.down.shape[1]
    expected = out_features, in_features
    if given != expected:
        raise ConfigError(
            f"adapter {adapter!r} is for another model: its update of {module} is {list(given)}, the "
            f"model's projection is {list(expected)}",
            field="adapters",
        )


def _product(layers: Sequence[Linear | SummedLinear]) -> Product:
    """Return the product of runs of rows with their own layers of one shape."""
    whole = [layer for layer in layers if isinstance(layer, Linear)]
    if len(whole) == len(layers):
        return GroupedLinear(whole).multiply_runs
    return partial(_one_by_one, layers)


def _one_by_one(layers: Sequence[Linear | SummedLinear], x: Tensor, runs: Runs) -> Tensor:
    """Multiply each run of rows by its own layer; all ranks have the same runs."""
    parts = zip(runs, torch.split(x, [count for _, count in runs]), strict=True)
    return torch.cat([layers[place](part) for (place, _), part in parts if len(part)])
