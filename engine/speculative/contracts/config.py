"""The speculation settings of a pool."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from runtime.errors import ConfigError

SUFFIX = Path("suffix")  # in place of a folder: drafts from the request's own text
# What drafts: a draft model or the request's grammar on the last stage, or its text on the leader.
Proposer = Literal["model", "grammar", "suffix"]
MAX_TOPK = 32
MAX_STEPS = 16
MAX_DRAFT_TOKENS = 128


@dataclass(frozen=True)
class SpeculationConfig:
    """Speculation with the draft in folder `draft`, or with `SUFFIX`.

    Trees have up to `topk` children per node, `steps` levels and `num_draft_tokens` drafted nodes.
    With `topk` 1 they are chains.

    Raises:
        ConfigError: a number is out of range, or the levels cannot have as many nodes.
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
        """Return the token limit of a verified row: drafted nodes and the known token."""
        return self.num_draft_tokens + 1
