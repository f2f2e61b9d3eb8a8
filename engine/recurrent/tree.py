"""Recurrent layers over draft trees: one state per node, from its parent's, in the very steps plain decoding takes.

A recurrence cannot be masked, so a tree runs level by level: each level is a decode batch whose slots are scratch rows
that start as copies of the parents' rows. Every row keeps the states of its last verification until stage 0 tells which
node was accepted last; that one moves to the slot.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch import ForwardBatch, ForwardMode
from engine.recurrent.backend import RecurrentBackend
from engine.trees import SpecInfo
from runtime.errors import InternalError

BackendOver = Callable[[Mapping[int, Tensor], Mapping[int, Tensor]], RecurrentBackend]


@dataclass(frozen=True)
class _Level:
    """The nodes of one depth: their tokens in the batch [N], the scratch rows they start from (slots of the pool at
    depth 0) [N], their own [N], and a decode batch over those."""

    tokens: Tensor
    sources: Tensor
    scratch_rows: Tensor
    nodes: ForwardBatch


class TreeRecurrent:
    """A `RecurrentBackend` that adds trees to one over slots. It also commits what a verification accepted.

    Scratch memory is `max_nodes` states per slot; it is touched only for slots that were verified.
    """

    def __init__(self, *, slots: RecurrentBackend, conv_pools: Mapping[int, Tensor], state_pools: Mapping[int, Tensor],
                 max_nodes: int, backend_over: BackendOver) -> None:
        """`slots` runs everything but trees over the pools; `backend_over` builds one of its kind over other pools."""
        self._slots = slots
        self._conv_pools, self._state_pools = dict(conv_pools), dict(state_pools)
        self._max_nodes = max_nodes
        self._conv_scratch = {layer_id: _scratch(pool, max_nodes) for layer_id, pool in conv_pools.items()}
        self._state_scratch = {layer_id: _scratch(pool, max_nodes) for layer_id, pool in state_pools.items()}
        self._nodes = backend_over(self._conv_scratch, self._state_scratch)
        self._planned: tuple[ForwardBatch, list[_Level]] | None = None

    def causal_conv(self, layer_id: int, x: Tensor, weight: Tensor, batch: ForwardBatch) -> Tensor:
        """See `RecurrentBackend.causal_conv`."""
        if batch.mode is not ForwardMode.VERIFY:
            return self._slots.causal_conv(layer_id, x, weight, batch)
        out = torch.empty_like(x)
        pool, scratch = self._conv_pools[layer_id], self._conv_scratch[layer_id]
        for level in self._start_levels(batch, pool, scratch):
            out[level.tokens] = self._nodes.causal_conv(layer_id, x[level.tokens], weight, level.nodes)
        return out

    def gated_delta_rule(self, layer_id: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
                         batch: ForwardBatch) -> Tensor:
        """See `RecurrentBackend.gated_delta_rule`."""
        if batch.mode is not ForwardMode.VERIFY:
            return self._slots.gated_delta_rule(layer_id, q, k, v, g, beta, batch)
        out = torch.empty(v.shape, dtype=torch.float32)
        pool, scratch = self._state_pools[layer_id], self._state_scratch[layer_id]
        for level in self._start_levels(batch, pool, scratch):
            at = level.tokens
            out[at] = self._nodes.gated_delta_rule(layer_id, q[at], k[at], v[at], g[at], beta[at], level.nodes)
        return out

    def commit(self, batch: ForwardBatch) -> None:
        """Move the state of each row's last accepted node to its slot."""
        if not isinstance(batch.spec_info, SpecInfo):
            return
        moves = [(slot * self._max_nodes + row.kept.nodes[-1], slot)
                 for row, slot in zip(batch.spec_info.rows, batch.slot_ids.tolist(), strict=True)
                 if row.kept is not None]
        if not moves:
            return
        sources, slots = torch.tensor(moves).t()
        for pools, scratch in ((self._conv_pools, self._conv_scratch), (self._state_pools, self._state_scratch)):
            for layer_id, pool in pools.items():
                pool[slots] = scratch[layer_id][sources]

    def _start_levels(self, batch: ForwardBatch, pool: Tensor, scratch: Tensor) -> "_Started":
        if self._planned is None or self._planned[0] is not batch:
            self._planned = (batch, _levels(batch, self._max_nodes))
        return _Started(self._planned[1], pool, scratch)


class _Started:
    """Iterates levels, root first; each one's scratch rows hold the parents' states when it is given out."""

    def __init__(self, levels: list[_Level], pool: Tensor, scratch: Tensor) -> None:
        self._levels = iter(levels)
        self._source = pool
        self._scratch = scratch

    def __iter__(self) -> "_Started":
        return self

    def __next__(self) -> _Level:
        level = next(self._levels)
        self._scratch[level.scratch_rows] = self._source[level.sources]
        self._source = self._scratch
        return level


def _scratch(pool: Tensor, max_nodes: int) -> Tensor:
    return torch.empty(pool.shape[0] * max_nodes, *pool.shape[1:], dtype=pool.dtype, device=pool.device)


def _levels(batch: ForwardBatch, max_nodes: int) -> list[_Level]:
    info = batch.spec_info
    if not isinstance(info, SpecInfo):
        raise InternalError("a VERIFY batch needs its trees")
    by_depth: dict[int, list[tuple[int, int, int, int]]] = {}
    first = 0
    for row, (spec, slot) in enumerate(zip(info.rows, batch.slot_ids.tolist(), strict=True)):
        if not 0 < len(spec.parents) == batch.query_lens[row] <= max_nodes:
            raise InternalError(f"row {row} brings {batch.query_lens[row]} nodes and a tree of {len(spec.parents)}; "
                                f"at most {max_nodes} are verified at once")
        for node, depth in enumerate(info.depths[row]):
            source = slot if depth == 0 else slot * max_nodes + spec.parents[node]
            entry = (first + node, source, slot * max_nodes + node, batch.context_lens[row] + depth)
            by_depth.setdefault(depth, []).append(entry)
        first += batch.query_lens[row]
    return [_level(entries) for _, entries in sorted(by_depth.items())]


def _level(entries: list[tuple[int, int, int, int]]) -> _Level:
    tokens, sources, scratch_rows, positions = torch.tensor(entries).t().contiguous()
    count = len(entries)
    nodes = ForwardBatch(
        mode=ForwardMode.DECODE, request_ids=tuple(range(count)), query_lens=(1,) * count,
        context_lens=tuple(positions.tolist()), token_ids=None, positions=positions,
        page_tables=torch.zeros(count, 1, dtype=torch.int32), slot_ids=scratch_rows.int(), sampling=(None,) * count)
    return _Level(tokens, sources, scratch_rows, nodes)
