"""The protocols of drafters, for the last stage."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from engine.contracts.model import StageOutput
from engine.core.batch import ForwardBatch
from engine.core.draft_trees import TokenTree
from engine.speculative.contracts.verify import AcceptedRun


class Drafter(Protocol):
    """A proposer of the tokens that the next target pass verifies.

    The last stage's engine thread owns it. Proposals never change the output, only the number of
    target passes.
    """

    def propose(
        self, batch: ForwardBatch, output: StageOutput, runs: Sequence[AcceptedRun]
    ) -> list[TokenTree]:
        """Return one tree per run, to follow the tokens that the run sampled.

        A tree has at most the row's `num_draft_tokens` nodes. A row with None is ignored; a row
        with 0 is followed without a tree. The method is called once for every batch of the pool, so
        that a draft with its own cache can follow. If no row of the batch samples, `runs` is empty.
        `batch.spec_info` is a `SpecInfo`.
        """
        ...

    def begin(self, batch: ForwardBatch) -> list[TokenTree]:
        """Return the first tree of each row of a PREBUILT batch.

        The prompts of the batch were handed over with the draft's state.
        """
        ...


class PoolDrafter(Drafter, Protocol):
    """A draft for either side of a handoff."""

    @property
    def num_plans(self) -> Mapping[str, int]:
        """Return how often its attention was planned, by path."""
        ...

    def follow(self, batch: ForwardBatch, output: StageOutput, runs: Sequence[AcceptedRun]) -> None:
        """Extend the draft's cache by the accepted tokens and propose nothing, on a prefill pool.

        At the end of a prompt, the state to hand over is complete.
        """
        ...
