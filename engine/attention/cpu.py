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
from engine.attention.scratch import Scratch
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
        self._scratch = Scratch()
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
            out[group.tokens] = self._attend(q[group.tokens], pool, group)
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
        queries = self._fold(q, group)  # [G, kv, rows, D]
        rows = queries.shape[2]
        keys, values = self._gather("keys", pool[:, 0], group), self._gather("values", pool[:, 1], group)
        for index, num_written in group.tails:
            values[index, :, num_written:].zero_()  # they get no weight, but 0 * NaN is NaN
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
        weights, sums = self._weights(queries, keys, group)  # [B * kv, rows, block] in q's dtype; [G, kv, rows]
        parts = torch.bmm(weights, values, out=self._scratch.take("parts", (len(weights), rows, q.shape[-1]), q.dtype))
        parts = self._by_tile(parts.view(len(group.block_tile), *queries.shape[1:]), group, fill=0.0)
        total = parts[:, 0].to(torch.float32, copy=True)  # not a view of what the next layer overwrites
        for index in range(1, group.max_blocks):
            total += parts[:, index]
        return self._unfold(total.div_(sums[..., None]), group).to(q.dtype)

    def _weights(self, queries: Tensor, keys: Tensor, group: TileGroup) -> tuple[Tensor, Tensor]:
        """Each block's softmax weights without the division, and the sums to divide by."""
        dtype, rows = queries.dtype, queries.shape[2]
        shape = (len(keys), rows, self._block)
        products = torch.bmm(self._by_block(queries, group).flatten(0, 1), keys.transpose(1, 2),
                             out=self._scratch.take("products", shape, dtype))
        scores = products
        if dtype is not torch.float32:
            scores = self._scratch.take("scores", shape, torch.float32).copy_(products)
        scores = scores.mul_(self._geometry.scale).view(-1, self._geometry.num_kv_heads, rows, self._block)
        self._mask(scores, group)
        row_max = self._by_tile(scores.amax(-1), group, fill=float("-inf")).amax(1)  # [G, kv, rows]
        scores.sub_(self._by_block(row_max, group)[..., None]).exp_()
        sums = self._by_tile(scores.sum(-1), group, fill=0.0).cumsum(1)[:, -1]
        scores = scores.view(shape)
        return scores if dtype is torch.float32 else products.copy_(scores), sums

    def _fold(self, q: Tensor, group: TileGroup) -> Tensor:
        """Queries that share a kv head become rows of one product: [G, kv, M * group_size, D], padded."""
        geometry = self._geometry
        shape = (group.num_tiles, group.tile_tokens, geometry.num_kv_heads, self._group_size, geometry.head_dim)
        folded = q.reshape(shape).transpose(1, 2).flatten(2, 3)
        missing = padded_rows(folded.shape[2], q.dtype) - folded.shape[2]
        return F.pad(folded, (0, 0, 0, missing)) if missing else folded

    def _unfold(self, out: Tensor, group: TileGroup) -> Tensor:
        geometry = self._geometry
        out = out[:, :, : group.tile_tokens * self._group_size]
        shape = (group.num_tiles, geometry.num_kv_heads, group.tile_tokens, self._group_size, geometry.head_dim)
        return out.reshape(shape).transpose(1, 2).reshape(-1, geometry.num_heads, geometry.head_dim)

    def _gather(self, name: str, pages: Tensor, group: TileGroup) -> Tensor:
        """Keys or values of the group's blocks, [B, kv, block, D]."""
        found = self._scratch.take(name, (len(group.pages), *pages.shape[1:]), pages.dtype)
        torch.index_select(pages, 0, group.pages, out=found)
        geometry, pages_per_block = self._geometry, self._block // self._geometry.page_size
        if pages_per_block > 1:
            found = found.view(-1, pages_per_block, *found.shape[1:]).transpose(1, 2).contiguous()
        return found.view(-1, geometry.num_kv_heads, self._block, geometry.head_dim)

    def _mask(self, scores: Tensor, group: TileGroup) -> None:
        """Minus infinity where a key must not be seen; rows added by padding stay as they are."""
        used = scores[:, :, : group.tile_tokens * self._group_size]
        shape = (len(group.hidden), -1, used.shape[1], group.tile_tokens, self._group_size, self._block)
        used.view(shape)[:, group.first_masked :].masked_fill_(group.hidden, float("-inf"))

    def _by_tile(self, x: Tensor, group: TileGroup, *, fill: float) -> Tensor:
        """[B, ...] to [G, N, ...], `fill` where a tile has fewer blocks."""
        if not group.is_even:
            padded = x.new_full((group.num_tiles * group.max_blocks, *x.shape[1:]), fill)
            padded[group.block_place] = x
            x = padded
        return x.view(group.num_tiles, group.max_blocks, *x.shape[1:])

    def _by_block(self, x: Tensor, group: TileGroup) -> Tensor:
        """[G, ...] to [B, ...]: each block gets what belongs to its tile."""
        if group.num_tiles == 1:
            return x.expand(len(group.block_tile), *x.shape[1:])
        return x[group.block_tile]
