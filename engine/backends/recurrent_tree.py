"""Recurrent layers over draft trees: one state per node, with the bits of plain decoding.

A recurrence cannot be masked. The convolution reads only inputs, which are all known at once: every
node is a decode row whose history is its own path. The delta rule runs in the one-step form.
Compiled code advances node by node from the parent's state; plain torch advances level by level, on
states gathered from the parents. Every row keeps the states of its last verification in the scratch
record that stage 0 leased to it. When a batch of stage 0 names the last accepted node, that state
moves to the slot.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.backends.gated_delta import decays_of, normalize_heads, recurrent_step
from engine.backends.recurrent_batch import Taps, delta_inputs, recurrent_rows
from engine.contracts.recurrent import PlanningRecurrent, RecurrentBackend
from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.draft_trees import SpecInfo, SpecRow, ancestors, node_depths
from engine.core.rows import longs
from engine.kernels.host.codegen.compiled import Team, dense_tokens, has_kernels
from engine.kernels.host.recurrent.causal_conv import causal_conv_of_trees
from engine.kernels.host.recurrent.delta_rule import delta_steps
from engine.kernels.host.tokens.row_ops import RecordMoves
from engine.kernels.recurrent_rows import RecurrentRows, StateSteps
from engine.memory.layout import NULL_INDEX
from runtime.errors import InternalError

BackendOver = Callable[[Mapping[int, Tensor], Mapping[int, Tensor]], RecurrentBackend]


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


@dataclass(frozen=True)
class TreePlan:
    """The inputs of compiled code for a batch of trees, from its `TreeLayout`.

    `histories` is by length.
    """

    rows: RecurrentRows
    steps: StateSteps
    histories: dict[int, Tensor]


class TreeRecurrent:
    """A `RecurrentBackend` that adds trees to a backend over slots.

    It also commits accepted nodes. Scratch memory is `num_scratch` records (including the null
    record) of `max_nodes` states: one record per running request, however many others hold a slot.
    """

    def __init__(
        self,
        *,
        slots: PlanningRecurrent,
        conv_pools: Mapping[int, Tensor],
        state_pools: Mapping[int, Tensor],
        max_nodes: int,
        num_scratch: int,
        backend_over: BackendOver,
    ) -> None:
        """Create a backend.

        `slots` runs everything except trees over the pools. `backend_over` builds a backend of its
        kind over other pools.
        """
        self._slots = slots
        self._conv_pools, self._state_pools = dict(conv_pools), dict(state_pools)
        self._max_nodes = max_nodes
        self._num_scratch = num_scratch
        self._conv_scratch, self._state_scratch = (
            {
                layer_id: node_scratch(pool, num_scratch * max_nodes)
                for layer_id, pool in pools.items()
            }
            for pools in (conv_pools, state_pools)
        )
        self._nodes = backend_over(self._conv_scratch, self._state_scratch)
        self._team, self._taps = Team(), Taps()
        pairs = [
            (scratch[layer_id], pool)
            for pools, scratch in (
                (self._conv_pools, self._conv_scratch),
                (self._state_pools, self._state_scratch),
            )
            for layer_id, pool in pools.items()
        ]
        self._has_pools = bool(pairs)
        self._moves = (
            RecordMoves(pairs)
            if pairs and all(has_kernels(pool.dtype) for _, pool in pairs)
            else None
        )
        self._planned: tuple[ForwardBatch, TreeLayout] | None = None

    def causal_conv(self, layer_id: int, x: Tensor, weight: Tensor, batch: ForwardBatch) -> Tensor:
        """Implement `RecurrentBackend.causal_conv`."""
        if batch.mode is not ForwardMode.VERIFY:
            return self._slots.causal_conv(layer_id, x, weight, batch)
        layout = self._layout(batch)
        length = weight.shape[1] - 1
        pool = self._conv_pools[layer_id]
        if x.dtype == pool.dtype and has_kernels(x.dtype):
            return causal_conv_of_trees(
                dense_tokens(x),
                self._taps.of(layer_id, weight),
                pool,
                layout.rows,
                layout.histories[length],
                layout.scratch_rows,
                self._conv_scratch[layer_id],
                self._team,
            )
        inputs = torch.cat([pool[layout.slots].flatten(0, 1), x])
        self._conv_scratch[layer_id][layout.scratch_rows] = inputs[layout.histories[length]]
        return self._nodes.causal_conv(layer_id, x, weight, _node_batch(batch, layout))

    def gated_delta_rule(
        self,
        layer_id: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        batch: ForwardBatch,
    ) -> Tensor:
        """Implement `RecurrentBackend.gated_delta_rule`."""
        if batch.mode is not ForwardMode.VERIFY:
            return self._slots.gated_delta_rule(layer_id, q, k, v, g, beta, batch)
        layout = self._layout(batch)
        if has_kernels(v.dtype):
            return delta_steps(
                delta_inputs(q, k, v, g, beta),
                layout.rows,
                layout.steps,
                self._state_pools[layer_id],
                self._state_scratch[layer_id],
                self._team,
            )
        return self._plain_delta_rule(layer_id, q, k, v, g, beta, layout)

    def _plain_delta_rule(
        self,
        layer_id: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        layout: TreeLayout,
    ) -> Tensor:
        q, k = normalize_heads(q, k, v.shape[1])
        v = v.float()
        g = decays_of(g)
        rows = layout.scratch_rows
        nodes = layout.nodes
        if nodes.by_depth is not None:
            q, k, v, g, beta, rows = (part[nodes.by_depth] for part in (q, k, v, g, beta, rows))
        outs = []
        states = []
        state = self._state_pools[layer_id][layout.slots]
        for level in nodes.levels:
            at = level.places
            before = state if level.parents is None else state[level.parents]
            out, state = recurrent_step(q[at], k[at], v[at], g[at], beta[at], before)
            outs.append(out)
            states.append(state)
        self._state_scratch[layer_id][rows] = torch.cat(states)
        out = torch.cat(outs)
        return (
            out
            if nodes.by_depth is None
            else torch.empty_like(out).index_copy_(0, nodes.by_depth, out)
        )

    def plan(self, batch: ForwardBatch) -> object:
        """Implement `PlansStates.plan`."""
        if batch.mode is not ForwardMode.VERIFY:
            return self._slots.plan(batch)
        if not self._conv_pools:  # there is no scratch memory to check either
            return None
        layout = self._layout(batch)
        return TreePlan(layout.rows, layout.steps, layout.histories)

    def commit(self, batch: ForwardBatch) -> None:
        """Move the state of each row's last accepted node to its slot."""
        moves = kept_states(batch, self._max_nodes, self._num_scratch) if self._has_pools else []
        if not moves:
            return
        if self._moves is not None:
            self._moves.run(moves)
            return
        sources, slots = torch.tensor(moves).t()
        for pools, scratch in (
            (self._conv_pools, self._conv_scratch),
            (self._state_pools, self._state_scratch),
        ):
            for layer_id, pool in pools.items():
                pool[slots] = scratch[layer_id][sources]

    def _layout(self, batch: ForwardBatch) -> TreeLayout:
        """Return the batch's layout, which the first recurrent layer of a forward makes."""
        if self._planned is None or self._planned[0] is not batch:
            pools = (*self._conv_pools.values(), *self._state_pools.values())
            lengths = {pool.shape[1] for pool in self._conv_pools.values()}
            self._planned = (
                batch,
                lay_out(
                    batch,
                    self._max_nodes,
                    self._num_scratch,
                    min((len(pool) for pool in pools), default=sys.maxsize),
                    lengths,
                ),
            )
        return self._planned[1]


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


def node_scratch(pool: Tensor, num_states: int) -> Tensor:
    """Allocate uninitialized memory for states like the records of a pool, [num_states, ...]."""
    return torch.empty(num_states, *pool.shape[1:], dtype=pool.dtype, device=pool.device)


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


def _node_batch(batch: ForwardBatch, layout: TreeLayout) -> ForwardBatch:
    """Return a decode batch with one row per node over the scratch rows."""
    nodes = layout.nodes
    count = len(layout.scratch_rows)
    positions = tuple(
        batch.context_lens[row] + depth
        for (row, _), depth in zip(nodes.paths, nodes.depths, strict=True)
    )
    return ForwardBatch(
        mode=ForwardMode.DECODE,
        request_keys=tuple(range(count)),
        query_lens=(1,) * count,
        context_lens=positions,
        token_ids=None,
        positions=torch.tensor(positions),
        page_tables=torch.zeros(count, 1, dtype=torch.int32),
        slot_ids=layout.scratch_rows.int(),
        sampling=(None,) * count,
    )
