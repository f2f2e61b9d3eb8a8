"""What the last stage needs of a draft."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from engine.contracts.model import StageOutput
from engine.core.batch import ForwardBatch
from engine.core.draft_trees import TokenTree
from engine.speculative.contracts.verify import Run


class Drafter(Protocol):
    """Proposes what the next target pass verifies. Belongs to the last stage's engine thread.

    Whatever it proposes, the output is the same; only the number of target passes differs.
    """

    def propose(
        self, batch: ForwardBatch, output: StageOutput, runs: Sequence[Run]
    ) -> list[TokenTree]:
        """One tree per run, of at most as many nodes as the row's `num_draft_tokens`, after the
        tokens it drew. A row that has None there is left out; one that has 0 is followed.

        Called once for every batch of the pool, also for those of which no row draws (`runs` is
        then empty), so that a draft with a cache of its own can follow. `batch.spec_info` is a
        `SpecInfo`.
        """
        ...

    def begin(self, batch: ForwardBatch) -> list[TokenTree]:
        """The first tree of each row of a PREBUILT batch, whose prompts were handed over with the
        draft's state."""
        ...


class PoolDrafter(Drafter, Protocol):
    """A draft with a cache of its own, on either side of a handoff."""

    @property
    def num_plans(self) -> Mapping[str, int]:
        """How often its attention was planned, by path."""
        ...

    def follow(self, batch: ForwardBatch, output: StageOutput, runs: Sequence[Run]) -> None:
        """Extend the draft's cache by what stands, and propose nothing: the part of a prefill pool.
        Where a prompt ends, what is handed over is complete."""
        ...
