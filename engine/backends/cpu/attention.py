"""Bit-exact paged attention on the CPU.

A token has the same bits in a prompt chunk of any length, in decoding, in verification and in a
replay. The other rows of the batch have no influence.
`engine/kernels/host/attention/paged_attention.py` gives the reasons.

Keys are read in place in their pages, by compiled code, or by plain torch for dtypes without
kernels.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from engine.backends.commit import commit_kv
from engine.backends.plan import AttentionPlan, build_plan, check_covered, window_parts
from engine.backends.recurrent_batch import resume_states
from engine.contracts.attention import AttentionGeometry
from engine.core.batch import ForwardBatch
from engine.kernels.host.attention.paged_attention import attend_in_place
from engine.kernels.host.codegen.compiled import Team, dense_tokens, has_kernels
from engine.kernels.host.tokens.kv_writes import write_tokens
from engine.kernels.rows_in_place import RowsInPlace
from runtime.errors import InternalError, StalePlanError


class CpuAttention:
    """An `AttentionBackend` over KV tensors, one per layer.

    The tensors are [num_pages, 2 (k, v), num_kv_heads, page_size, head_dim]. For sliding-window
    layers they are [num_slots, pages, 2 (k, v), num_kv_heads, page_size, head_dim]: the pages of a
    row's window, which new pages overwrite (`window_parts`).

    Keys that no token may see are never used, whatever they hold (NaN included): pages outside a
    row's table, the null page, the unwritten tail of a page. A plan does not cover rows that the
    batch gained after planning. `run` rejects such a batch instead of returning results for some
    rows only.
    """

    def __init__(
        self,
        *,
        kv_pools: Mapping[int, Tensor],
        geometry: AttentionGeometry,
        window_pools: Mapping[int, Tensor] | None = None,
    ) -> None:
        self._windows = dict(window_pools or {})
        self._rings = {layer_id: pool.flatten(0, 1) for layer_id, pool in self._windows.items()}
        self._windowed = geometry.windowed or geometry
        _check_pools(kv_pools, geometry)
        _check_pools(self._rings, self._windowed)
        self._pools = dict(kv_pools)
        self._num_pages = min((len(pool) for pool in kv_pools.values()), default=None)
        self._geometry = geometry
        self._team = Team()
        self.num_plans = 0

    def plan(self, batch: ForwardBatch, *, replan_equivalent: bool = False) -> None:
        """Plan the keys and the destinations of the batch's tokens, and mark the batch.

        Trees are planned once for all their nodes.
        """
        plan = build_plan(batch, self._geometry, self._num_pages)
        if self._windows:
            slots = next(iter(self._windows.values()))
            plan = replace(plan, parts=tuple(window_parts(batch, self._windowed, *slots.shape[:2])))
        batch.mark_forward_metadata_ready(self, plan=plan, replan_equivalent=replan_equivalent)
        self.num_plans += 1

    def run(
        self,
        layer_id: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: ForwardBatch,
        *,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write k and v of the new tokens to their pages, then attend.

        Shapes are those of `AttentionBackend.run`.

        Raises:
            StalePlanError: the batch was not planned by this backend, or its rows or tokens differ
                from the plan's.
            InternalError: this stage has no KV tensor for the layer.
        """
        plan = self._checked_plan(batch)
        check_covered(
            batch,
            (plan.num_rows, plan.num_tokens),
            self._windowed if layer_id in self._windows else self._geometry,
            q,
            k,
            v,
        )
        if layer_id in self._windows:
            return self._run_window(layer_id, q, k, v, plan, sinks)
        pool = self._pool(layer_id)
        _write(pool, k, v, plan, self._team)
        return attend(pool, q, plan.rows, self._geometry.scale, self._team, sinks)

    def read(self, layer_id: int, q: Tensor, batch: ForwardBatch) -> Tensor:
        """Implement `CachedAttention.read`."""
        plan = self._checked_plan(batch)
        if layer_id not in self._windows:
            return attend(self._pool(layer_id), q, plan.rows, self._geometry.scale, self._team)
        (part,) = plan.parts
        return attend(self._rings[layer_id], q, part.plan.rows, self._windowed.scale, self._team)

    def _pool(self, layer_id: int) -> Tensor:
        if layer_id not in self._pools:
            raise InternalError(f"layer {layer_id} has no KV pages on this stage")
        return self._pools[layer_id]

    def commit(self, batch: ForwardBatch) -> None:
        """Move the keys and values of accepted nodes to the positions of plain decoding.

        Rows that resume from a kept window get a copy of it.
        """
        commit_kv(self._pools, batch, self._geometry.page_size)
        resume_states(batch, self._windows.values())

    def _run_window(
        self,
        layer_id: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: AttentionPlan,
        sinks: Tensor | None,
    ) -> Tensor:
        slots = self._windows[layer_id]
        pages = self._rings[layer_id]
        out = torch.empty_like(q)
        for part in plan.parts:
            _write(pages, k[part.tokens], v[part.tokens], part.plan, self._team)
            out[part.tokens] = attend(
                pages, q[part.tokens], part.plan.rows, self._windowed.scale, self._team, sinks
            )
            if part.copy is not None:
                slots[part.copy.target] = slots[part.copy.slot_id]
        return out

    def _checked_plan(self, batch: ForwardBatch) -> AttentionPlan:
        plan = batch.forward_metadata_plan
        if batch.forward_metadata_planner is not self or not isinstance(plan, AttentionPlan):
            raise StalePlanError("the batch was not planned by this attention backend")
        return plan


def _check_pools(pools: Mapping[int, Tensor], geometry: AttentionGeometry) -> None:
    """Check the pages and the geometry.

    Raises:
        InternalError: the pages have another shape, or the geometry is impossible.
    """
    if geometry.num_heads % geometry.num_kv_heads:
        raise InternalError(
            f"{geometry.num_heads} heads cannot share {geometry.num_kv_heads} kv heads evenly"
        )
    if geometry.scale <= 0:
        raise InternalError(f"the scale of scores must be more than 0, got {geometry.scale}")
    page_shape = (2, geometry.num_kv_heads, geometry.page_size, geometry.head_dim)
    for layer_id, pool in pools.items():
        if tuple(pool.shape[1:]) != page_shape:
            raise InternalError(
                f"layer {layer_id}: pages are {tuple(pool.shape[1:])}, geometry says {page_shape}"
            )


def _write(pool: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, team: Team) -> None:
    if k.dtype == v.dtype == pool.dtype and has_kernels(pool.dtype):
        write_tokens(
            dense_tokens(k), dense_tokens(v), pool, plan.write_pages, plan.write_offsets, team
        )
    else:
        pool[plan.write_pages, 0, :, plan.write_offsets] = k
        pool[plan.write_pages, 1, :, plan.write_offsets] = v


def attend(
    pages: Tensor,
    q: Tensor,
    rows: RowsInPlace,
    scale: float,
    team: Team,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend to the keys of `pages`.

    pages is [P, 2 (k, v), num_kv_heads, page_size, D]; q is [T, num_heads, D], of new tokens whose
    keys are written. For `sinks` see `AttentionBackend.run`. The result has the shape and dtype of
    q.
    """
    if has_kernels(pages.dtype):
        queries = dense_tokens(q.to(pages.dtype))
        return attend_in_place(pages, queries, rows, scale, team, sinks).to(q.dtype)
    return attend_by_token(pages, q, rows, scale, sinks)


def attend_by_token(
    pages: Tensor, q: Tensor, rows: RowsInPlace, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Attend one token at a time.

    It is slow and works with any dtype. A token's bits depend on its own keys only.
    """
    out = torch.empty_like(q)
    for row, first, count in rows.tiles.tolist():
        for token in range(first, first + count):
            cached = _keys_of(pages, rows, row, token)
            keys, values = cached.float()[..., None, :, :].unbind(1)  # [kv, 1, keys, D]
            queries = q[token].float().view(len(keys), -1, 1, q.shape[-1])
            scores = (queries * keys).sum(-1)  # [kv, heads of each, keys]
            if sinks is not None:
                scores = torch.cat([sinks.view(*scores.shape[:2], 1), scores], -1)
            weights = scores.mul(scale).softmax(-1)[..., -keys.shape[2] :]
            out[token] = (weights[..., None] * values).sum(-2).view(q.shape[1:])
    return out


def _keys_of(pages: Tensor, rows: RowsInPlace, row: int, token: int) -> Tensor:
    """Return the keys and values that the token sees, [kv heads, 2, keys, D]."""
    page_size = pages.shape[3]
    num_keys = int(rows.positions[token]) + 1
    positions = torch.arange(
        max(0, num_keys - 1 - rows.window), min(num_keys, int(rows.num_in_order[row]))
    )
    slots = rows.tables[row].long()[positions // page_size] * page_size + positions % page_size
    slots = torch.cat([slots, rows.paths[token, : max(0, num_keys - int(rows.num_in_order[row]))]])
    return pages[slots // page_size, :, :, slots % page_size].permute(2, 1, 0, 3)
