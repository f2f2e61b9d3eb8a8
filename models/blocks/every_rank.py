"""The tokens of all data ranks, for the parts of a stage that they compute together."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.core.batch import AdapterRun, DataShare
from models.blocks.low_rank import AdapterRows, TokenAdapters


@dataclass(frozen=True)
class EveryRank:
    """The tokens of a step on every data rank.

    `counts` are by data rank. `adapters` are those of all these tokens; None if no token has one.
    """

    counts: Sequence[int]
    adapters: TokenAdapters | None

    @staticmethod
    def of_tokens(shares: Sequence[DataShare], rows: AdapterRows) -> "EveryRank":
        """Return all tokens of a step."""
        return _together([(share.tokens, share.adapters) for share in shares], rows)

    @staticmethod
    def of_logits(shares: Sequence[DataShare], rows: AdapterRows) -> "EveryRank":
        """Return the tokens of a step whose logits are computed."""
        return _together([(share.logits, share.logit_adapters) for share in shares], rows)


def _together(shares: Iterable[tuple[int, Sequence[AdapterRun]]], rows: AdapterRows) -> EveryRank:
    counts, of_ranks = zip(*shares, strict=True)
    if not any(of_ranks):
        return EveryRank(counts, None)
    runs = [
        run for count, own in zip(counts, of_ranks, strict=True) for run in own or (("", count),)
    ]
    return EveryRank(counts, rows.of_runs(runs))
