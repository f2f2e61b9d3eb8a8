"""The gated feed-forward: down(silu(gate(x)) * up(x))."""

from dataclasses import dataclass

from torch import Tensor

from engine.core.numerics import silu
from models.blocks.config import RawConfig
from models.blocks.spec import FeedForward
from models.blocks.weights import Weights


@dataclass(frozen=True)
class MlpSpec:
    hidden_size: int
    intermediate_size: int
    bias: bool = False

    counts_on_host = False

    def build(self, weights: Weights) -> FeedForward:
        return Mlp(spec=self, weights=weights)


def read_mlp(raw: RawConfig, *, bias: bool = False) -> MlpSpec:
    """Raises ConfigError for an activation other than silu."""
    raw.require("hidden_act", only="silu", default="silu")
    return MlpSpec(hidden_size=raw.integer("hidden_size"), intermediate_size=raw.integer("intermediate_size"),
                   bias=bias)


class Mlp:
    """silu and the product with it cost no pass of their own where weights are packed."""

    def __init__(self, *, spec: MlpSpec, weights: Weights) -> None:
        width = spec.intermediate_size
        self._gate, self._up = (weights.linear(name, rows=(width,), in_features=spec.hidden_size, bias=spec.bias)
                                for name in ("gate_proj", "up_proj"))
        self._down = weights.linear("down_proj", rows=(spec.hidden_size,), in_features=width, bias=spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self._down(self._up.times(x, self._gate.silu(x)))


def gated_product(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of a fused [T, 2 * width] product."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up
