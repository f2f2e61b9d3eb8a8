"""How a pool speculates, as configured at start."""

from dataclasses import dataclass
from pathlib import Path

from runtime.errors import ConfigError

MAX_TOPK, MAX_STEPS, MAX_DRAFT_TOKENS = 32, 16, 128


@dataclass(frozen=True)
class SpeculationConfig:
    """`draft` is the folder of the draft. Trees have up to `topk` children per node, `steps` levels
    and `num_draft_tokens` drafted nodes; topk 1 makes chains.

    Raises:
        ConfigError: a number outside its limits, or more nodes than the levels can have.
    """

    draft: Path
    topk: int
    steps: int
    num_draft_tokens: int

    def __post_init__(self) -> None:
        for field, value, limit in (
            ("spec_topk", self.topk, MAX_TOPK),
            ("spec_steps", self.steps, MAX_STEPS),
            ("spec_draft_tokens", self.num_draft_tokens, MAX_DRAFT_TOKENS),
        ):
            if not 1 <= value <= limit:
                raise ConfigError(f"{field} must be from 1 to {limit}, got {value}", field=field)
        most = self.topk + (self.steps - 1) * self.topk**2
        if not self.steps <= self.num_draft_tokens <= most:
            raise ConfigError(
                f"{self.steps} steps of top-{self.topk} draft {self.steps} to {most} tokens, "
                f"spec_draft_tokens is {self.num_draft_tokens}",
                field="spec_draft_tokens",
            )

    @property
    def max_nodes(self) -> int:
        """Tokens of one row under verification: the drafted ones and the known one they follow."""
        return self.num_draft_tokens + 1
