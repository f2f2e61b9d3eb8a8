"""Numbers of a tree that contradict each other are refused, naming the flag."""

from pathlib import Path

import pytest

from engine.speculative.contracts.config import SpeculationConfig
from runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("topk", "steps", "nodes"), [(1, 1, 1), (1, 3, 3), (4, 4, 15), (8, 5, 31), (4, 1, 4)]
)
def test_trees_that_exist(topk: int, steps: int, nodes: int) -> None:
    assert SpeculationConfig(Path("draft"), topk, steps, nodes).max_nodes == nodes + 1


@pytest.mark.parametrize(
    ("topk", "steps", "nodes", "field"),
    [
        (0, 3, 3, "spec_topk"),
        (33, 3, 3, "spec_topk"),
        (1, 0, 3, "spec_steps"),
        (1, 17, 17, "spec_steps"),
        (4, 4, 0, "spec_draft_tokens"),
        (32, 16, 129, "spec_draft_tokens"),
        (1, 3, 4, "spec_draft_tokens"),
        (4, 4, 3, "spec_draft_tokens"),
        (2, 2, 7, "spec_draft_tokens"),
    ],
)
def test_trees_that_cannot_be_are_refused(topk: int, steps: int, nodes: int, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        SpeculationConfig(Path("draft"), topk, steps, nodes)
