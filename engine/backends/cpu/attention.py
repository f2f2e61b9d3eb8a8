"""Paged attention on the CPU, bit-exact: a token has the same bits read in a chunk of any length, drawn, verified in a
chain or a tree, or replayed, whatever stands beside it (`engine/kernels/host/in_place.py` says why).

Keys are read in the pages where they lie, by compiled code or, for types that it does not know, in plain torch.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.backends.commit import commit_kv
from engine.backends.plan import AttentionPlan, build_plan, check_covered
from engine.contracts.attention import AttentionGeometry
from engine.core.batch import ForwardBatch
from engine.kernels.host.compiled import Team, has_kernels
from engine.kernels.host.in_place import attend_in_place
from engine.kernels.rows_in_place import RowsInPlace
from runtime.errors import InternalError, StalePlanError


class CpuAttention:
    """An `AttentionBackend` over KV tensors [num_pages, 2 (k, v), num_kv_heads, page_size, head_dim], one per layer.

    Keys that no token may see are never used, whatever they hold (NaN included): pages that are not in a row's table,
    the null page, the unwritten tail of a page. Rows a batch gained after planning are not covered by the plan;
    `run` refuses such a batch instead of answering for some rows only.
    """

    def __init__(self, *, kv_pools: Mapping[int, Tensor], geometry: AttentionGeometry) -> None:
        if geometry.num_heads % geometry.num_kv_heads:
            raise InternalError(f"{geometry.num_heads} heads cannot share {geometry.num_kv_heads} kv heads evenly")
        if geometry.window is not None:
            raise InternalError("attention on the CPU knows no windows")
        if geometry.scale <= 0:
            raise InternalError(f"scores are scaled by more than 0, not by {geometry.scale}")
        page_shape = (2, geometry.num_kv_heads, geometry.page_size, geometry.head_dim)
        for layer_id, pool in kv_pools.items():
            if tuple(pool.shape[1:]) != page_shape:
                raise InternalError(f"layer {layer_id}: pages are {tuple(pool.shape[1:])}, geometry says {page_shape}")
        self._pools = dict(kv_pools)
        self._num_pages = min((len(pool) for pool in kv_pools.values()), default=None)
        self._geometry = geometry
        self._team = Team()
        self.num_plans = 0

    def plan(self, batch: ForwardBatch, *, replan_equivalent: bool = False) -> None:
        """Prepare what the batch's tokens see and where they go, and mark it; trees once for all their nodes."""
        plan = build_plan(batch, self._geometry, self._num_pages)
        batch.mark_forward_metadata_ready(self, plan=plan, replan_equivalent=replan_equivalent)
        self.num_plans += 1

    def run(self, layer_id: int, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch) -> Tensor:
        """Write k, v of the new tokens to their pages, then attend. Shapes as in `AttentionBackend.run`.

        Raises:
            StalePlanError: the batch was not planned by this backend, or its rows or tokens are not the planned ones.
            InternalError: this stage has no KV tensor for the layer.
        """
        plan = self._checked_plan(batch, q, k, v)
        if layer_id not in self._pools:
            raise InternalError(f"layer {layer_id} has no KV pages on this stage")
        pool = self._pools[layer_id]
        _write(pool, k, v, plan)
        return attend(pool, q, plan.rows, self._geometry.scale, self._team)

    def commit(self, batch: ForwardBatch) -> None:
        """Move the keys and values of accepted nodes to where plain decoding would have stored them."""
        commit_kv(self._pools, batch, self._geometry.page_size)

    def _checked_plan(self, batch: ForwardBatch, q: Tensor, k: Tensor, v: Tensor) -> AttentionPlan:
        plan = batch.forward_metadata_plan
        if batch.forward_metadata_planner is not self or not isinstance(plan, AttentionPlan):
            raise StalePlanError("the batch was not planned by this attention backend")
        check_covered(batch, (plan.num_rows, plan.num_tokens), plan.geometry, q, k, v)
        return plan


def _write(pool: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> None:
    if not plan.runs:
        pool[plan.write_pages, 0, :, plan.write_offsets] = k
        pool[plan.write_pages, 1, :, plan.write_offsets] = v
    for run in plan.runs:
        tokens = slice(run.first_token, run.first_token + run.num_tokens)
        page = pool[run.page, :, :, run.offset : run.offset + run.num_tokens]
        page[0].copy_(k[tokens].transpose(0, 1))
        page[1].copy_(v[tokens].transpose(0, 1))


def attend(pages: Tensor, q: Tensor, rows: RowsInPlace, scale: float, team: Team) -> Tensor:
    """pages: [P, 2 (k, v), num_kv_heads, page_size, D]; q: [T, num_heads, D] of new tokens whose keys are written.
    Returns the same as q."""
    if has_kernels(pages.dtype):
        return attend_in_place(pages, q.to(pages.dtype).contiguous(), rows, scale, team).to(q.dtype)
    return attend_by_token(pages, q, rows, scale)


def attend_by_token(pages: Tensor, q: Tensor, rows: RowsInPlace, scale: float) -> Tensor:
    """The same one token after the other: slow, in any type, and a token's bits depend on its own keys only."""
    out = torch.empty_like(q)
    for row, first, count in rows.tiles.tolist():
        for token in range(first, first + count):
            cached = _keys_of(pages, rows, row, token)
            keys, values = cached.float()[..., None, :, :].unbind(1)  # [kv, 1, keys, D]
            queries = q[token].float().view(len(keys), -1, 1, q.shape[-1])
            weights = (queries * keys).sum(-1).mul(scale).softmax(-1)
            out[token] = (weights[..., None] * values).sum(-2).view(q.shape[1:])
    return out


def _keys_of(pages: Tensor, rows: RowsInPlace, row: int, token: int) -> Tensor:
    """[kv heads, 2, keys, D]: what the token sees."""
    page_size, num_keys = pages.shape[3], int(rows.positions[token]) + 1
    positions = torch.arange(min(num_keys, int(rows.num_in_order[row])))
    slots = rows.tables[row].long()[positions // page_size] * page_size + positions % page_size
    slots = torch.cat([slots, rows.paths[token, : num_keys - len(slots)]])
    return pages[slots // page_size, :, :, slots % page_size].permute(2, 1, 0, 3)
