"""Paged attention on the CPU in plain torch, bit-exact under any batching.

Every product has a fixed inner shape: queries of one kv head against one block of keys, blocks on a grid of absolute
positions, always read whole and masked afterwards. The row maximum is taken over all blocks (exact in any order);
sums and weighted values of the blocks are added in position order. So a row's bits depend on its own keys only.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.backend import AttentionGeometry
from engine.attention.plan import AttentionPlan, TileGroup, build_plan, key_block
from engine.batch import ForwardBatch
from engine.numerics import Numerics, padded_rows
from runtime.errors import InternalError, StalePlanError


class CpuAttention:
    """An `AttentionBackend` over KV tensors [num_pages, 2 (k, v), num_kv_heads, page_size, head_dim], one per layer.

    Keys that no token may see are never used, whatever they hold (NaN included): pages that are not in a row's table,
    the null page, the unwritten tail of a page. Rows a batch gained after planning are not covered by the plan;
    `run` refuses such a batch instead of answering for some rows only.
    """

    def __init__(self, *, kv_pools: Mapping[int, Tensor], geometry: AttentionGeometry, numerics: Numerics) -> None:
        if geometry.num_heads % geometry.num_kv_heads:
            raise InternalError(f"{geometry.num_heads} heads cannot share {geometry.num_kv_heads} kv heads evenly")
        page_shape = (2, geometry.num_kv_heads, geometry.page_size, geometry.head_dim)
        for layer_id, pool in kv_pools.items():
            if tuple(pool.shape[1:]) != page_shape:
                raise InternalError(f"layer {layer_id}: pages are {tuple(pool.shape[1:])}, geometry says {page_shape}")
        self._pools = dict(kv_pools)
        self._geometry = geometry
        self._numerics = numerics
        self._block = key_block(geometry.page_size)
        self._group_size = geometry.num_heads // geometry.num_kv_heads
        self.num_plans = 0

    def plan(self, batch: ForwardBatch, *, replan_equivalent: bool = False) -> None:
        """Prepare the batch's gather tables, lengths and masks and mark it."""
        plan = build_plan(batch, self._geometry)
        batch.mark_forward_metadata_ready(self, plan=plan, replan_equivalent=replan_equivalent)
        self.num_plans += 1

    def run(self, layer_id: int, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch) -> Tensor:
        """Write k, v of the new tokens to their pages, then attend. Shapes as in `AttentionBackend.run`.

        Raises:
            StalePlanError: the batch was not planned by this backend, or its rows or tokens are not the planned ones.
            InternalError: this stage has no KV tensor for the layer.
        """
        plan = self._checked_plan(batch, q, k, v)
        pool = self._pools.get(layer_id)
        if pool is None:
            raise InternalError(f"layer {layer_id} has no KV pages on this stage")
        pool[plan.write_pages, 0, :, plan.write_offsets] = k
        pool[plan.write_pages, 1, :, plan.write_offsets] = v
        if len(plan.groups) == 1:
            return self._attend(q, pool, plan.groups[0])
        out = torch.empty_like(q)
        for group in plan.groups:
            out[group.token_index] = self._attend(q[group.token_index], pool, group)
        return out

    def _checked_plan(self, batch: ForwardBatch, q: Tensor, k: Tensor, v: Tensor) -> AttentionPlan:
        plan = batch.forward_metadata_plan
        if batch.forward_metadata_planner is not self or not isinstance(plan, AttentionPlan):
            raise StalePlanError("the batch was not planned by this attention backend")
        if (batch.num_rows, batch.num_tokens) != (plan.num_rows, plan.num_tokens):
            raise StalePlanError(f"planned for {plan.num_rows} rows and {plan.num_tokens} tokens, the batch has "
                                 f"{batch.num_rows} and {batch.num_tokens}")
        geometry = plan.geometry
        kv_shape = (plan.num_tokens, geometry.num_kv_heads, geometry.head_dim)
        if q.shape != (plan.num_tokens, geometry.num_heads, geometry.head_dim) or not k.shape == v.shape == kv_shape:
            raise StalePlanError(f"planned for {plan.num_tokens} tokens of {geometry}, got q {tuple(q.shape)}, "
                                 f"k {tuple(k.shape)}, v {tuple(v.shape)}")
        return plan

    def _attend(self, q: Tensor, pool: Tensor, group: TileGroup) -> Tensor:
        """q: [G * M, num_heads, head_dim] of the group's tokens. Returns the same shape."""
        geometry = self._geometry
        queries = self._fold(q, group)  # [G, kv, rows, D]
        num_blocks, rows = len(group.block_tile), queries.shape[2]
        keys, values = self._gather(pool, group)  # [B * kv, block, D]
        scores = torch.bmm(queries[group.block_tile].flatten(0, 1), keys.transpose(1, 2))
        scores = self._mask(scores.float() * geometry.scale, group, rows)  # [B, kv, rows, block]
        row_max = self._by_tile(scores.amax(-1), group, fill=float("-inf")).amax(1)  # [G, kv, rows]
        weights = torch.exp(scores - row_max[group.block_tile][..., None])
        sums = self._by_tile(weights.sum(-1), group, fill=0.0).cumsum(1)[:, -1]
        parts = torch.bmm(weights.to(q.dtype).flatten(0, 1), values).float()
        parts = self._by_tile(parts.view(num_blocks, geometry.num_kv_heads, rows, -1), group, fill=0.0)
        total = parts[:, 0].clone()
        for index in range(1, group.max_blocks):
            total += parts[:, index]
        return self._unfold(total / sums[..., None], group).to(q.dtype)

    def _fold(self, q: Tensor, group: TileGroup) -> Tensor:
        """Queries that share a kv head become rows of one product: [G, kv, M * group_size, D], padded."""
        geometry = self._geometry
        shape = (group.num_tiles, group.tile_tokens, geometry.num_kv_heads, self._group_size, geometry.head_dim)
        folded = q.reshape(shape).transpose(1, 2).flatten(2, 3)
        missing = padded_rows(folded.shape[2], q.dtype) - folded.shape[2]
        return F.pad(folded, (0, 0, 0, missing)) if missing > 0 else folded

    def _unfold(self, out: Tensor, group: TileGroup) -> Tensor:
        geometry = self._geometry
        out = out[:, :, : group.tile_tokens * self._group_size]
        shape = (group.num_tiles, geometry.num_kv_heads, group.tile_tokens, self._group_size, geometry.head_dim)
        return out.reshape(shape).transpose(1, 2).reshape(-1, geometry.num_heads, geometry.head_dim)

    def _gather(self, pool: Tensor, group: TileGroup) -> tuple[Tensor, Tensor]:
        """Keys and values of the group's blocks, [B * kv, block, D] each; unwritten values are zero."""
        geometry = self._geometry
        keys, values = (self._blocks(pool[:, part].index_select(0, group.pages)) for part in (0, 1))
        if group.unwritten.numel():
            values.view(-1, geometry.head_dim).index_fill_(0, group.unwritten, 0.0)
        return keys, values

    def _blocks(self, pages: Tensor) -> Tensor:
        """[B * P, kv, page_size, D] to [B * kv, block, D]."""
        pages_per_block = self._block // self._geometry.page_size
        if pages_per_block > 1:
            pages = pages.view(-1, pages_per_block, *pages.shape[1:]).transpose(1, 2)
        return pages.contiguous().view(-1, self._block, self._geometry.head_dim)

    def _mask(self, scores: Tensor, group: TileGroup, rows: int) -> Tensor:
        """Minus infinity where a key must not be seen; rows added by padding stay as they are."""
        num_blocks, kv_heads = len(group.block_tile), self._geometry.num_kv_heads
        scores = scores.view(num_blocks, kv_heads, rows, self._block)
        used = scores[:, :, : group.tile_tokens * self._group_size]
        by_token = used.view(num_blocks, kv_heads, group.tile_tokens, self._group_size, self._block)
        by_token.masked_fill_(group.hidden, float("-inf"))
        return scores

    def _by_tile(self, x: Tensor, group: TileGroup, *, fill: float) -> Tensor:
        """[B, ...] to [G, max_blocks, ...], `fill` where a tile has fewer blocks."""
        if len(group.block_tile) == group.num_tiles * group.max_blocks:
            return x.view(group.num_tiles, group.max_blocks, *x.shape[1:])
        padded = x.new_full((group.num_tiles * group.max_blocks, *x.shape[1:]), fill)
        padded[group.block_slot] = x
        return padded.view(group.num_tiles, group.max_blocks, *x.shape[1:])
