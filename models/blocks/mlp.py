"""The gated feed-forward: down(silu(gate(x)) * up(x))."""

from dataclasses import dataclass, replace

from torch import Tensor

from engine.core.layer_range import ONLY_RANK, Part, TensorRank
from models.blocks.config import RawConfig
from models.blocks.spec import FeedForward
from models.blocks.weights import Weights


@dataclass(frozen=True)
class MlpSpec:
    hidden_size: int
    intermediate_size: int
    bias: bool = False
    rank: TensorRank = ONLY_RANK

    counts_on_host = False

    def __post_init__(self) -> None:
        """Raises ConfigError where the ranks cannot divide it."""
        _ = self.width

    @property
    def width(self) -> Part:
        """This rank's of the inner values."""
        return self.rank.terms(self.intermediate_size, "inner values of a feed-forward")

    def of_rank(self, rank: TensorRank) -> "MlpSpec":
        """See `FeedForwardSpec.of_rank`."""
        return replace(self, rank=rank)

    def build(self, weights: Weights) -> FeedForward:
        return Mlp(spec=self, weights=weights)


def read_mlp(raw: RawConfig, *, bias: bool = False) -> MlpSpec:
    """Raises ConfigError for an activation other than silu."""
    raw.require("hidden_act", only="silu", default="silu")
    return MlpSpec(hidden_size=raw.integer("hidden_size"), intermediate_size=raw.integer("intermediate_size"),
                   bias=bias)


class Mlp:
    def __init__(self, *, spec: MlpSpec, weights: Weights) -> None:
        width = spec.width
        self._gate_up = weights.gated("gate_proj", "up_proj", rows=width, in_features=spec.hidden_size, bias=spec.bias)
        self._down = weights.summed("down_proj", rows=spec.hidden_size, terms=width, bias=spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self._down(self._gate_up(x))
