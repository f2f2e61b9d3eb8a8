"""Recurrent layers on a CUDA device: the same contract as on the CPU, by Triton kernels."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch import ForwardBatch, ForwardMode
from engine.kernels.conv import conv_prefill
from engine.kernels.delta import Moves, conv_step, delta_step
from engine.kernels.delta_chunks import delta_chunks
from engine.recurrent.checks import check_mode, pool_of
from engine.recurrent.tree import lay_out
from engine.trees import SpecInfo
from runtime.errors import InternalError


@dataclass(frozen=True)
class _Rows:
    """Per row of a batch: slots [R] int64, and fresh [R] bool where it starts from zero."""

    slots: Tensor
    fresh: Tensor


@dataclass(frozen=True)
class _Depth:
    """The nodes of one depth: their tokens [N] int64, and what they read and write. The roots read the slots, the
    others the scratch records of their parents."""

    tokens: Tensor
    moves: Moves


class DeviceRecurrent:
    """A `RecurrentBackend` over conv pools [num_slots, kernel - 1, channels] and state pools [num_slots, Hv, dk, dv]
    fp32, by layer id, all on one device. Also verifies trees of up to `max_nodes` nodes per row and commits them."""

    def __init__(self, *, conv_pools: Mapping[int, Tensor], state_pools: Mapping[int, Tensor],
                 max_nodes: int = 0) -> None:
        self._conv_pools, self._state_pools = dict(conv_pools), dict(state_pools)
        self._max_nodes = max_nodes
        self._conv_scratch = {layer_id: _scratch(pool, max_nodes) for layer_id, pool in conv_pools.items()}
        self._state_scratch = {layer_id: _scratch(pool, max_nodes) for layer_id, pool in state_pools.items()}
        self._prepared: tuple[ForwardBatch, _Rows, list[_Depth]] | None = None

    def causal_conv(self, layer_id: int, x: Tensor, weight: Tensor, batch: ForwardBatch) -> Tensor:
        """See `RecurrentBackend.causal_conv`."""
        pool = pool_of(self._conv_pools, layer_id, "conv")
        rows, depths = self._prepare(batch)
        if batch.mode is ForwardMode.PREFILL:
            return conv_prefill(x.contiguous(), weight, pool, rows.slots, rows.fresh, batch.query_lens)
        if batch.mode is ForwardMode.DECODE:
            return conv_step(x.contiguous(), weight, pool, pool, Moves(rows.slots, rows.slots, rows.fresh))
        out, before = torch.empty_like(x), pool
        for depth in depths:
            after = self._conv_scratch[layer_id]
            out[depth.tokens] = conv_step(x[depth.tokens], weight, before, after, depth.moves)
            before = after
        return out

    def gated_delta_rule(self, layer_id: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
                         batch: ForwardBatch) -> Tensor:
        """See `RecurrentBackend.gated_delta_rule`."""
        pool = pool_of(self._state_pools, layer_id, "state")
        rows, depths = self._prepare(batch)
        q, k, v, g, beta = (part.contiguous() for part in (q, k, v, g, beta))
        if batch.mode is ForwardMode.PREFILL:
            return delta_chunks(q, k, v, g, beta, pool, rows.slots, rows.fresh, batch.query_lens)
        if batch.mode is ForwardMode.DECODE:
            return delta_step(q, k, v, g, beta, pool, pool, Moves(rows.slots, rows.slots, rows.fresh))
        out, before = torch.empty(v.shape, dtype=torch.float32, device=v.device), pool
        for depth in depths:
            after = self._state_scratch[layer_id]
            at = depth.tokens
            out[at] = delta_step(q[at], k[at], v[at], g[at], beta[at], before, after, depth.moves)
            before = after
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
        for pools, scratch in ((self._conv_pools, self._conv_scratch), (self._state_pools, self._state_scratch)):
            for layer_id, pool in pools.items():
                sources, slots = torch.tensor(moves, device=pool.device).t()
                pool[slots] = scratch[layer_id][sources]

    def _prepare(self, batch: ForwardBatch) -> tuple[_Rows, list[_Depth]]:
        """Made at the first recurrent layer of a forward, used by all."""
        if self._prepared is None or self._prepared[0] is not batch:
            is_verified = batch.mode is ForwardMode.VERIFY
            if not is_verified:
                check_mode(batch)
            device = next(iter([*self._conv_pools.values(), *self._state_pools.values()])).device
            fresh = torch.tensor([context == 0 for context in batch.context_lens], dtype=torch.bool, device=device)
            rows = _Rows(batch.slot_ids.long().to(device), fresh)
            self._prepared = batch, rows, self._depths(batch, rows) if is_verified else []
        return self._prepared[1:]

    def _depths(self, batch: ForwardBatch, rows: _Rows) -> list[_Depth]:
        if not self._max_nodes:
            raise InternalError("this pool keeps no states of tree nodes")
        layout = lay_out(batch, self._max_nodes)
        device = rows.slots.device
        order = torch.arange(batch.num_tokens) if layout.by_depth is None else layout.by_depth
        records, depths, sources, fresh = layout.scratch_rows[order].to(device), list[_Depth](), rows.slots, rows.fresh
        for level in layout.levels:
            if level.parents is not None:
                sources, fresh = sources[level.parents.to(device)], fresh[level.parents.to(device)]
            targets = records[level.places]
            depths.append(_Depth(order[level.places].to(device), Moves(sources, targets, fresh)))
            sources, fresh = targets, torch.zeros(len(targets), dtype=torch.bool, device=device)
        return depths


def _scratch(pool: Tensor, max_nodes: int) -> Tensor:
    return torch.empty(pool.shape[0] * max_nodes, *pool.shape[1:], dtype=pool.dtype, device=pool.device)
