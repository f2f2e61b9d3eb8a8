"""The gated feed-forward down(act(gate(x)) * up(x)), with silu in most families."""

from dataclasses import dataclass, replace

from torch import Tensor

from engine.core.layer_range import ONLY_RANK, Part, TensorRank
from models.blocks.config import RawConfig
from models.blocks.linear import Activation
from models.blocks.spec import FeedForward
from models.blocks.weights import Weights


@dataclass(frozen=True)
class MlpSpec:
    """A gated feed-forward.

    `intermediate_size` counts the inner values of all ranks. `field` is its config field, for
    messages.
    """

    hidden_size: int
    intermediate_size: int
    bias: bool = False
    activation: Activation = Activation.SILU
    rank: TensorRank = ONLY_RANK
    field: str = "intermediate_size"

    counts_on_host = False
    num_experts = 0

    def __post_init__(self) -> None:
        """Check that the ranks can divide it.

        Raises:
            ConfigError: they cannot.
        """
        _ = self.widths

    @property
    def widths(self) -> tuple[Part, ...]:
        """Return the inner values of each rank."""
        what = f"inner values of a feed-forward ({self.field})"
        return tuple(rank.terms(self.intermediate_size, what) for rank in self.rank.every)

    def of_rank(self, rank: TensorRank) -> "MlpSpec":
        """Implement `FeedForwardSpec.of_rank`."""
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
    """Read the fields of a gated feed-forward.

    Raises:
        ConfigError: `field` names an activation other than the family's.
    """
    raw.require(field, only=activation.value, default=activation.value)
    return MlpSpec(
        hidden_size=raw.integer("hidden_size"),
        intermediate_size=raw.integer("intermediate_size"),
        bias=bias,
        activation=activation,
    )


class Mlp:
    """A `FeedForward` with this rank's inner values. Its output is the sum over all ranks."""

    expert_tokens = None

    def __init__(self, *, spec: MlpSpec, weights: Weights) -> None:
        self._gate_up = weights.gated(
            "gate_proj",
            "up_proj",
            rows=spec.widths[spec.rank.rank],
            in_features=spec.hidden_size,
            bias=spec.bias,
            activation=spec.activation,
        )
        self._down = weights.summed(
            "down_proj", rows=spec.hidden_size, terms=spec.widths, bias=spec.bias
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return [T, hidden] for x [T, hidden]."""
        return self._down(self._gate_up(x))
