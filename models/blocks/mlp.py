"""The gated feed-forward: down(act(gate(x)) * up(x)), act being silu in most families."""

from dataclasses import dataclass, replace

from torch import Tensor

from engine.core.layer_range import ONLY_RANK, Part, TensorRank
from models.blocks.config import RawConfig
from models.blocks.linear import Activation
from models.blocks.spec import FeedForward
from models.blocks.weights import Weights


@dataclass(frozen=True)
class MlpSpec:
    """`intermediate_size`: inner values, those of other ranks included. `field`: what of the config
    says so."""

    hidden_size: int
    intermediate_size: int
    bias: bool = False
    activation: Activation = Activation.SILU
    rank: TensorRank = ONLY_RANK
    field: str = "intermediate_size"

    counts_on_host = False
    num_experts = 0

    def __post_init__(self) -> None:
        """Raises ConfigError where the ranks cannot divide it."""
        _ = self.width

    @property
    def width(self) -> Part:
        """This rank's of the inner values."""
        return self.rank.terms(
            self.intermediate_size, f"inner values of a feed-forward ({self.field})"
        )

    def of_rank(self, rank: TensorRank) -> "MlpSpec":
        """See `FeedForwardSpec.of_rank`."""
        return replace(self, rank=rank)

    def build(self, weights: Weights) -> FeedForward:
        return Mlp(spec=self, weights=weights)


def read_mlp(
    raw: RawConfig,
    *,
    bias: bool = False,
    activation: Activation = Activation.SILU,
    field: str = "hidden_act",
) -> MlpSpec:
    """Raises ConfigError for an activation other than the family's, which `field` names."""
    raw.require(field, only=activation.value, default=activation.value)
    return MlpSpec(
        hidden_size=raw.integer("hidden_size"),
        intermediate_size=raw.integer("intermediate_size"),
        bias=bias,
        activation=activation,
    )


class Mlp:
    """A `FeedForward` of which this rank has some of the inner values; what it returns is the sum
    over all ranks."""

    expert_tokens = None

    def __init__(self, *, spec: MlpSpec, weights: Weights) -> None:
        width = spec.width
        self._gate_up = weights.gated(
            "gate_proj",
            "up_proj",
            rows=width,
            in_features=spec.hidden_size,
            bias=spec.bias,
            activation=spec.activation,
        )
        self._down = weights.summed("down_proj", rows=spec.hidden_size, terms=width, bias=spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, hidden]. Returns [T, hidden]."""
        return self._down(self._gate_up(x))
