"""Recurrent layers over draft trees: one state per node, with the bits of plain decoding.

A recurrence cannot be masked. The convolution reads only inputs, which are all known at once: every
node is a decode row whose history is its own path. The delta rule runs in the one-step form.
Compiled code advances node by node from the parent's state; plain torch advances level by level, on
states gathered from the parents. Every row keeps the states of its last verification in the scratch
record that stage 0 leased to it. When a batch of stage 0 names the last accepted node, that state
moves to the slot.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.gated_delta import decays_of, normalize_heads, recurrent_step
from engine.backends.recurrent_batch import Taps, delta_inputs
from engine.backends.tree_layout import TreeLayout, kept_states, lay_out
from engine.contracts.recurrent import PlanningRecurrent, RecurrentBackend
from engine.core.batch import ForwardBatch, ForwardMode
from engine.kernels.host.codegen.compiled import Team, dense_tokens, has_kernels
from engine.kernels.host.recurrent.causal_conv import causal_conv_of_trees
from engine.kernels.host.recurrent.delta_rule import delta_steps
from engine.kernels.host.tokens.row_ops import RecordMoves
from engine.kernels.recurrent_rows import RecurrentRows, StateSteps

BackendOver = Callable[[Mapping[int, Tensor], Mapping[int, Tensor]], RecurrentBackend]


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


def node_scratch(pool: Tensor, num_states: int) -> Tensor:
    """Allocate uninitialized memory for states like the records of a pool, [num_states, ...]."""
    return torch.empty(num_states, *pool.shape[1:], dtype=pool.dtype, device=pool.device)


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
