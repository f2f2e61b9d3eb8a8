"""Construction of the low-rank updates of a stage's projections."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

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


class StageAdapters:
    """The adapters of a stage, from which its projections take their updates."""

    def __init__(self, source: FactorSource | None = None, names: Sequence[str] = ()) -> None:
        """Create the adapters `names` of a stage, which read `source`; without one there are none."""
        self.rows = AdapterRows(names)
        self._source = source

    def updates(
        self,
        projection: Projection,
        *,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks | None,
    ) -> LowRankUpdates | None:
        """Return the updates of a projection, or None if no adapter targets it.

        The parts of a projection share one product, with A of the parts one below another. `ranks`
        are those that divide its sum, if there are several.

        Raises:
            ConfigError: an adapter's factors do not have the shape of the projection.
        """
        if self._source is None:
            return None
        found: dict[str, dict[str, LowRankFactors]] = {}
        for name in projection.parts:
            for adapter, factors in self._source.factors(projection.prefix + name).items():
                found.setdefault(adapter, {})[name] = factors
        by_rank: dict[int, dict[str, _AdapterFactors]] = {}
        for adapter, by_name in found.items():
            joined = _joined(adapter, projection, by_name, dtype, device)
            by_rank.setdefault(len(joined.down), {})[adapter] = joined
        if not by_rank:
            return None
        groups = [
            UpdateGroup(
                tuple(members),
                _down([each.down for each in members.values()], projection, ranks),
                tuple(each.ups for each in members.values()),
            )
            for members in by_rank.values()
        ]
        return LowRankUpdates(self.rows, groups)


@dataclass(frozen=True)
class _AdapterFactors:
    """One adapter's factors of a whole projection: A of all parts, and B by part."""

    down: Tensor
    ups: tuple[UpFactor, ...]


def _joined(
    adapter: str,
    projection: Projection,
    by_name: Mapping[str, LowRankFactors],
    dtype: torch.dtype,
    device: torch.device,
) -> _AdapterFactors:
    order = projection.order
    downs = list[Tensor]()
    ups = list[UpFactor]()
    first_row = 0
    for name, rows in projection.parts.items():
        parts = intervals(rows)
        count = num_rows(rows)
        factors = by_name.get(name)
        if factors is not None:
            _check(adapter, projection, name, factors, parts[0].total)
            own = torch.cat([factors.up[part.start : part.stop] for part in parts])
            first_term = sum(len(down) for down in downs)
            places = np.flatnonzero((order >= first_row) & (order < first_row + count))
            for outputs in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1):
                taken = own[torch.from_numpy(order[outputs] - first_row)]
                matrix = taken.T.to(device, dtype).contiguous()
                ups.append(UpFactor(matrix, first_term, int(outputs[0])))
            downs.append(factors.down)
        first_row += count
    return _AdapterFactors(torch.cat(downs).to(device, dtype), tuple(ups))


def _check(
    adapter: str, projection: Projection, name: str, factors: LowRankFactors, out_features: int
) -> None:
    given = factors.up.shape[0], factors.down.shape[1]
    expected = out_features, projection.in_features
    if given != expected:
        raise ConfigError(
            f"adapter {adapter!r} is for another model: its update of {projection.prefix}{name} is "
            f"{list(given)}, the model's projection is {list(expected)}",
            field="adapters",
        )


def _down(matrices: Sequence[Tensor], projection: Projection, ranks: Ranks | None) -> Product:
    terms = projection.terms
    if terms is None or terms.is_whole or ranks is None:
        return GroupedLinear([Linear(matrix) for matrix in matrices]).multiply_runs
    layers = [
        SummedLinear(
            matrix[:, terms.start : terms.stop].contiguous(), None, ranks, num_terms=terms.total
        )
        for matrix in matrices
    ]
    return partial(_one_by_one, layers)


def _one_by_one(layers: Sequence[SummedLinear], x: Tensor, runs: Runs) -> Tensor:
    """Multiply each run of rows by its own layer; all ranks have the same runs."""
    parts = zip(runs, torch.split(x, [count for _, count in runs]), strict=True)
    return torch.cat([layers[place](part) for (place, _), part in parts if len(part)])
