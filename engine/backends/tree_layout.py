"""The layout of a batch of draft trees for recurrent layers: nodes by level, and their slots."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.backends.recurrent_batch import recurrent_rows
from engine.core.batch import ForwardBatch
from engine.core.draft_trees import SpecInfo, SpecRow, ancestors, node_depths
from engine.core.rows import longs
from engine.kernels.recurrent_rows import RecurrentRows, StateSteps
from engine.memory.layout import NULL_INDEX
from runtime.errors import InternalError


@dataclass(frozen=True)
class Level:
    """The nodes of one depth.

    Attributes:
        places: the places of the nodes among all nodes in order of depth.
        parents: [N], the places of the parents among the nodes of the previous level (at depth 0
            the rows); None if each node continues the one in its place.
    """

    places: slice
    parents: Tensor | None


@dataclass(frozen=True)
class TreeNodes:
    """The data derived from the parents of R trees with T nodes in total.

    All batches of the same trees share it.

    Attributes:
        parents: [T], the token that each node continues; -1 for its row's slot.
        depths: [T].
        levels: the nodes by depth.
        by_depth: [T] int64, the nodes' tokens in order of depth; None if they are in this order.
        paths: for each node its row and its ancestors' tokens in the batch, itself last.
    """

    parents: NDArray[np.int64]
    depths: list[int]
    levels: list[Level]
    by_depth: Tensor | None
    paths: list[tuple[int, list[int]]]
    _histories: dict[int, NDArray[np.int64]] = field(default_factory=dict)

    def history(self, length: int) -> Tensor:
        """Return the places of the last `length` inputs before each node, [T, length] int64.

        They index the R * length old inputs, followed by the T new ones. The result is a copy,
        because a recording refills its inputs.
        """
        known = self._histories.get(length)
        if known is None:
            num_old = (self.paths[-1][0] + 1) * length
            places = []
            for row, path in self.paths:
                before = [
                    *range(row * length, (row + 1) * length),
                    *(num_old + token for token in path[:-1]),
                ]
                places.append(before[-length:])
            known = self._histories[length] = np.array(places)
        return torch.from_numpy(known.copy())


@dataclass(frozen=True)
class TreeLayout:
    """A batch of trees with R rows and T nodes.

    Attributes:
        nodes: the nodes of the trees.
        rows: the rows, for compiled code.
        steps: the nodes, for compiled code: they continue their parents, and their states are kept.
        slots: [R] int64.
        scratch_rows: [T] int64, the records of the nodes' states.
        histories: `TreeNodes.history` by length.
    """

    nodes: TreeNodes
    rows: RecurrentRows
    steps: StateSteps
    slots: Tensor
    scratch_rows: Tensor
    histories: dict[int, Tensor]


def kept_states(batch: ForwardBatch, max_nodes: int, num_scratch: int) -> list[tuple[int, int]]:
    """Return (node state, slot) of each row's last accepted node."""
    if not isinstance(batch.spec_info, SpecInfo):
        return []
    return [
        (first_state(row, slot, max_nodes, num_scratch) + row.accepted.nodes[-1], slot)
        for row, slot in zip(batch.spec_info.rows, batch.slot_ids.tolist(), strict=True)
        if row.accepted is not None
    ]


def first_state(row: SpecRow, slot: int, max_nodes: int, num_scratch: int) -> int:
    """Return the index of the first state of the row's nodes.

    Raises:
        InternalError: the pool does not have the record, or a leased slot has the null record.
    """
    if not (slot != NULL_INDEX) <= row.scratch < num_scratch:
        raise InternalError(
            f"scratch record {row.scratch} of {num_scratch} for a tree of slot {slot}"
        )
    return row.scratch * max_nodes


def lay_out(
    batch: ForwardBatch,
    max_nodes: int,
    num_scratch: int,
    num_slots: int,
    lengths: Iterable[int] = (),
) -> TreeLayout:
    """Lay out a VERIFY batch, with histories of these lengths.

    Raises:
        InternalError: the batch has no trees, or a tree, a slot or a scratch record is out of
            range.
    """
    info = batch.spec_info
    kept = list[int]()
    if not isinstance(info, SpecInfo):
        raise InternalError("a VERIFY batch needs its trees")
    for row, (spec, slot) in enumerate(zip(info.rows, batch.slot_ids.tolist(), strict=True)):
        first = first_state(spec, slot, max_nodes, num_scratch)
        if not 0 < len(spec.parents) == batch.query_lens[row] <= max_nodes:
            raise InternalError(
                f"row {row} brings {batch.query_lens[row]} nodes and a tree of {len(spec.parents)}; "
                f"at most {max_nodes} are verified at once"
            )
        kept += range(first, first + len(spec.parents))
    nodes = _nodes_of(tuple(spec.parents for spec in info.rows))
    scratch_rows = longs(kept)
    parents = torch.from_numpy(nodes.parents.copy())
    rows = recurrent_rows(batch, num_slots)
    return TreeLayout(
        nodes,
        rows,
        StateSteps(parents, scratch_rows),
        rows.slots,
        scratch_rows,
        {length: nodes.history(length) for length in lengths},
    )


@lru_cache(maxsize=64)  # chains have few lengths, and most steps have the shape of the previous one
def _nodes_of(trees: tuple[tuple[int, ...], ...]) -> TreeNodes:
    # By depth: (token, place of its parent in the previous level).
    by_depth: dict[int, list[tuple[int, int]]] = {}
    paths: list[tuple[int, list[int]]] = []
    parents = list[int]()
    depths = list[int]()
    for row, tree in enumerate(trees):
        first = len(paths)
        places = list[int]()
        for node, (parent, depth) in enumerate(zip(tree, node_depths(tree), strict=True)):
            level = by_depth.setdefault(depth, [])
            places.append(len(level))
            level.append((first + node, row if parent < 0 else places[parent]))
            paths.append((row, [first + other for other in ancestors(tree, node)]))
            parents.append(first + parent if parent >= 0 else -1)
            depths.append(depth)
    levels = []
    width = len(trees)
    order = list[int]()
    for _, nodes in sorted(by_depth.items()):
        before = [parent for _, parent in nodes]
        in_place = before == list(range(width))
        levels.append(
            Level(
                slice(len(order), len(order) + len(nodes)),
                None if in_place else torch.tensor(before),
            )
        )
        order += [token for token, _ in nodes]
        width = len(nodes)
    is_ordered = order == list(range(len(order)))
    return TreeNodes(
        np.array(parents), depths, levels, None if is_ordered else torch.tensor(order), paths
    )
