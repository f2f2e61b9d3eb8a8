"""The layers of routed experts. Files store them one by one or stacked along a first axis."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.core.layer_range import Part
from models.blocks.adapted import ExpertProjection
from models.blocks.linear import GatedLinear, GroupedLinear, Linear, gated
from models.blocks.low_rank import LowRankUpdates, index_tensor, untouched_rows
from models.blocks.weights import Weights


class ExpertLayers(Protocol):
    """The experts of a rank."""

    def __call__(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Return [T, hidden] for x [T, hidden].

        The first counts[0] rows of x belong to the rank's first expert, and so on.
        """
        ...


@dataclass(frozen=True)
class ExpertShape:
    """The experts of a layer: a rank's own ones, and the widths of each."""

    own: Part
    hidden_size: int
    width: int
    swaps_factors: bool = False  # of adapters, as `ExpertProjection.is_swapped`

    @property
    def others(self) -> list[int]:
        """Return the experts of other ranks."""
        own = range(self.own.start, self.own.stop)
        return [index for index in range(self.own.total) if index not in own]

    @property
    def items(self) -> list[tuple[int, int]]:
        """Return this rank's entries of a stack; see `Weights.linear_item`."""
        return [(index, self.own.total) for index in range(self.own.start, self.own.stop)]


class GatedExperts:
    """Experts that compute down(silu(gate(x)) * up(x))."""

    def __init__(self, *, shape: ExpertShape, weights: Weights, updated: Weights) -> None:
        """Create the experts. `weights` have no adapters, those of `updated` update them."""
        read = _read_stacks if weights.has("gate_up_proj") else _read_each
        gated, down = read(shape, weights)
        self._gate_up, self._down = GroupedLinear(gated), GroupedLinear(down)
        width, hidden = shape.width, shape.hidden_size
        self._inner_updates = _updates(
            shape, updated, "gate_up_proj", {"gate_proj": width, "up_proj": width}, hidden
        )
        self._down_updates = _updates(shape, updated, "down_proj", {"down_proj": hidden}, width)
        if self._inner_updates is not None:
            self._gates = GroupedLinear([each.gate for each in gated])
            self._ups = GroupedLinear([each.up for each in gated])

    def __call__(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Implement `ExpertLayers`."""
        inner = self._inner(x, counts)
        return _updated(self._down(inner, counts), inner, self._down_updates, counts)

    def _inner(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the gated products, as `GatedLinear` does: rows with updates take two products."""
        updates = self._inner_updates
        rest = None if updates is None else untouched_rows((updates,), len(x))
        if rest is None:
            return self._gate_up(x, counts)
        both = torch.cat([self._gates(x, counts), self._ups(x, counts)], dim=1)
        gate, up = _updated(both, x, updates, counts).chunk(2, dim=1)
        inner = gated(gate, up)
        if len(rest):
            expert_of = np.repeat(np.arange(len(counts)), counts)[rest]
            rows = index_tensor(rest)
            inner[rows] = self._gate_up(
                x[rows], np.bincount(expert_of, minlength=len(counts)).tolist()
            )
        return inner


def _updates(
    shape: ExpertShape, updated: Weights, stack: str, parts: Mapping[str, int], in_features: int
) -> LowRankUpdates | None:
    """Return the adapters' updates of a projection; see `ExpertProjection`."""
    return updated.updates_of_experts(
        ExpertProjection(updated.prefix, stack, parts, in_features, shape.own, shape.swaps_factors)
    )


def _updated(
    product: Tensor, x: Tensor, updates: LowRankUpdates | None, counts: Sequence[int]
) -> Tensor:
    """Return the experts' product with x after the updates of its rows."""
    return product if updates is None else updates.add(product, x, counts)


def _read_stacks(shape: ExpertShape, weights: Weights) -> tuple[list[GatedLinear], list[Linear]]:
    width, hidden = shape.width, shape.hidden_size
    gated = [
        weights.gated_item("gate_up_proj", rows=width, in_features=hidden, item=item)
        for item in shape.items
    ]
    down = [
        weights.linear_item("down_proj", rows=hidden, in_features=width, item=item)
        for item in shape.items
    ]
    for name, index in product(("gate_up_proj", "down_proj"), shape.others):
        weights.skip(name, index)
    return gated, down


def _read_each(shape: ExpertShape, weights: Weights) -> tuple[list[GatedLinear], list[Linear]]:
    width, hidden = shape.width, shape.hidden_size
    each = [weights.at(str(index)) for index, _ in shape.items]
    for index, name in product(shape.others, ("gate_proj", "up_proj", "down_proj")):
        weights.skip(f"{index}.{name}.weight")
    gated = [
        expert.gated("gate_proj", "up_proj", rows=width, in_features=hidden) for expert in each
    ]
    down = [expert.linear("down_proj", rows=(hidden,), in_features=width) for expert in each]
    return gated, down


@dataclass(frozen=True)
class ClampedSwiglu:
    """The activation (min(max(u, -l), l) + 1) * g sigmoid(a g) with g = min(gate, l).

    Attributes:
        alpha: a.
        limit: l.
    """

    alpha: float
    limit: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return the activation, fp32, of two fp32 tensors of one shape."""
        gate = gate.clamp(max=self.limit)
        up = up.clamp(min=-self.limit, max=self.limit)
        # Composed as in `engine.core.numerics`.
        return (up + 1.0) * (gate / (gate * -self.alpha).exp_().add_(1.0))


class ClampedExperts:
    """Experts with biases that compute down(f(gate(x), up(x))), f a `ClampedSwiglu`.

    They are stacked. Rows of gate and up alternate.
    """

    def __init__(
        self, *, shape: ExpertShape, activation: ClampedSwiglu, weights: Weights, updated: Weights
    ) -> None:
        """Create the experts. `weights` have no adapters, those of `updated` update them."""
        self._activation = activation
        layers: list[GroupedLinear] = []
        biases: list[Tensor] = []
        updates: list[LowRankUpdates | None] = []
        for name, rows, columns in (
            ("gate_up_proj", 2 * shape.width, shape.hidden_size),
            ("down_proj", shape.hidden_size, shape.width),
        ):
            layers.append(
                GroupedLinear(
                    [
                        weights.linear_item(name, rows=rows, in_features=columns, item=item)
                        for item in shape.items
                    ]
                )
            )
            each = [
                weights.tensor(f"{name}_bias", rows, dtype=torch.float32, item=item)
                for item in shape.items
            ]
            biases.append(torch.stack(each))
            updates.append(_updates(shape, updated, name, {name: rows}, columns))
            for index in shape.others:
                weights.skip(name, index)
                weights.skip(f"{name}_bias", index)
        self._gate_up, self._down = layers
        self._inner_biases, self._biases = biases
        self._inner_updates, self._down_updates = updates

    def __call__(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Implement `ExpertLayers`."""
        of_row = torch.repeat_interleave(torch.tensor(counts)).to(x.device)
        product = _updated(self._gate_up(x, counts), x, self._inner_updates, counts)
        both = product.float() + self._inner_biases[of_row]
        inner = self._activation(*both.view(len(x), both.shape[1] // 2, 2).unbind(-1)).to(x.dtype)
        product = _updated(self._down(inner, counts), inner, self._down_updates, counts)
        return (product.float() + self._biases[of_row]).to(x.dtype)
