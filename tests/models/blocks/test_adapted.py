"""The updates of a projection by several adapters."""

import itertools
from dataclasses import dataclass

import torch

from models.blocks.adapted import Projection, StageAdapters
from models.blocks.low_rank import LowRankFactors

RANKS = {"a@1": 4, "b@1": 8, "b@2": 4, "c@1": 8}


@dataclass
class Source:
    """The factors of an adapter of one projection. Implements `FactorSource`."""

    name: str

    def factors(self, module: str) -> LowRankFactors | None:
        rank = RANKS[self.name]
        return LowRankFactors(torch.ones(rank, 8), torch.ones(6, rank))

    def finish(self) -> None:
        pass


def test_the_order_of_loads_does_not_change_the_order_of_updates() -> None:
    """A rank that starts again has another order than the ranks with which it exchanges sums."""
    found = set()
    for order in itertools.permutations(RANKS):
        adapters = StageAdapters(has_any=True)
        updates = adapters.updates(
            Projection("layer.", {"q_proj": 6}, 8),
            dtype=torch.float32,
            device=torch.device("cpu"),
            ranks=None,
        )
        assert updates is not None
        for name in order:
            adapters.load(name, Source(name))
        adapters.drop(order[0])
        adapters.load(order[0], Source(order[0]))
        found.add(tuple(group.names for group in updates.groups))
    assert found == {(("a@1", "b@2"), ("b@1", "c@1"))}
