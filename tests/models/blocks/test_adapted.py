"""The updates of a projection by several adapters."""

import itertools
from dataclasses import dataclass

import torch

from engine.core.layer_range import Part
from models.blocks.adapted import ExpertProjection, Projection, StageAdapters
from models.blocks.low_rank import LowRankFactors

RANKS = {"a@1": 4, "b@1": 8, "b@2": 4, "c@1": 8}


@dataclass
class Source:
    """The factors of an adapter of one projection. Implements `FactorSource`."""

    name: str

    def factors(self, module: str) -> LowRankFactors | None:
        rank = RANKS[self.name]
        return LowRankFactors(torch.ones(rank, 8), torch.ones(6, rank))

    def skip(self, module: str) -> bool:
        raise AssertionError(f"{module} is of this rank")

    def finish(self) -> None:
        pass


class ExpertSource:
    """Random factors of three experts with ranks 2, 5 and 1; the gates of the last two have none."""

    name = "a"

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.given = {
            f"experts.{expert}.{name}": LowRankFactors(
                torch.randn(rank, 8, generator=generator), torch.randn(6, rank, generator=generator)
            )
            for expert, rank in enumerate((2, 5, 1))
            for name in ("gate_proj", "up_proj")
            if not (expert and name == "gate_proj")
        }
        self.skipped: list[str] = []

    def factors(self, module: str) -> LowRankFactors | None:
        return self.given.get(module)

    def skip(self, module: str) -> bool:
        self.skipped.append(module)
        return module in self.given

    def finish(self) -> None:
        pass


def test_rows_take_the_updates_of_their_adapter_and_expert() -> None:
    """Of experts 1 and 2 of three; expert 0 is another rank's."""
    adapters, source = StageAdapters(has_any=True), ExpertSource()
    updates = adapters.updates_of_experts(
        ExpertProjection(
            "experts.", "gate_up_proj", {"gate_proj": 6, "up_proj": 6}, 8, Part(1, 3, 3)
        ),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    assert updates is not None
    adapters.load("a", source)
    assert source.skipped == [f"experts.0.{name}_proj" for name in ("gate_up", "gate", "up")]
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(4))
    runs = (("", 1), ("a", 1), ("", 1), ("a", 2))
    with adapters.rows.having(adapters.rows.of_runs(runs)):
        found = updates.add(torch.zeros(5, 12), x, [2, 3])
    expected = torch.zeros(5, 12)
    for row, expert in ((1, 1), (3, 2), (4, 2)):
        factors = source.given[f"experts.{expert}.up_proj"]
        expected[row, 6:] = factors.up @ (factors.down @ x[row])
    torch.testing.assert_close(found, expected)


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
