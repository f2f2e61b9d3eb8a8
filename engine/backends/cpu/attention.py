"""Paged attention on the CPU, bit-exact under any batching: prompts in plain torch, drawn tokens and drafts in place.

A row's keys are gathered in position order to a multiple of 64, whatever the page size, and masked after the product:
a score is one sum over head_dim, and longer rows beside it change nothing. Softmax adds a row's weights in order, so
keys that weigh nothing at the end change nothing. Weighted values are summed in spans on a grid of absolute positions,
because the product kernels regroup longer sums. The tests hold all of this to equal bits.
"""

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from engine.backends.cpu.in_place import InPlace
from engine.backends.cpu.scratch import Scratch
from engine.backends.plan import AttentionPlan, QueryTile, RowGroup, bits_of, build_plan, is_read_in_place, key_step
from engine.contracts.attention import AttentionGeometry, check_covered
from engine.core.batch import ForwardBatch
from engine.core.numerics import Numerics, padded_rows, span_terms
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
        if geometry.window is not None:
            raise InternalError("attention on the CPU knows no windows")
        page_shape = (2, geometry.num_kv_heads, geometry.page_size, geometry.head_dim)
        for layer_id, pool in kv_pools.items():
            if tuple(pool.shape[1:]) != page_shape:
                raise InternalError(f"layer {layer_id}: pages are {tuple(pool.shape[1:])}, geometry says {page_shape}")
        key_step(geometry.page_size)  # refuses page sizes that do not fit
        self._pools = dict(kv_pools)
        # As a list of records [num_pages * 2 * num_kv_heads, page_size, head_dim]; values follow their keys.
        self._keys = {layer_id: pool.view(-1, *page_shape[2:]) for layer_id, pool in kv_pools.items()}
        self._values = {layer_id: keys[geometry.num_kv_heads :] for layer_id, keys in self._keys.items()}
        self._geometry = geometry
        self._dtype = next((pool.dtype for pool in kv_pools.values()), torch.float32)
        self._exact = numerics is Numerics.EXACT
        self._share = geometry.num_heads // geometry.num_kv_heads
        self._scratch = Scratch()
        self.num_plans = 0

    def plan(self, batch: ForwardBatch, *, replan_equivalent: bool = False) -> None:
        """Prepare the batch's gather tables, lengths and masks and mark it."""
        reader = self._in_place if is_read_in_place(batch) else None
        plan = build_plan(batch, self._geometry, self._dtype, num_pages=None if reader is None else reader.num_pages)
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
        _write(self._pools[layer_id], k, v, plan)
        if plan.in_place is not None and self._in_place is not None:
            return self._in_place.attend(layer_id, q, plan.in_place)
        if len(plan.groups) == 1:
            return self._attend(layer_id, q, plan.groups[0])
        out = torch.empty_like(q)
        for group in plan.groups:
            out[group.tokens] = self._attend(layer_id, q[group.tokens], group)
        return out

    @cached_property
    def _in_place(self) -> InPlace | None:
        """Made by the first batch that can use it: there is something to compile."""
        return InPlace.over(self._pools, self._geometry.scale)

    def _checked_plan(self, batch: ForwardBatch, q: Tensor, k: Tensor, v: Tensor) -> AttentionPlan:
        plan = batch.forward_metadata_plan
        if batch.forward_metadata_planner is not self or not isinstance(plan, AttentionPlan):
            raise StalePlanError("the batch was not planned by this attention backend")
        check_covered(batch, (plan.num_rows, plan.num_tokens), plan.geometry, q, k, v)
        return plan

    def _attend(self, layer_id: int, q: Tensor, group: RowGroup) -> Tensor:
        """q: [G * M, num_heads, head_dim] of the group's tokens. Returns the same shape."""
        geometry = self._geometry
        shape = (group.num_rows, -1, geometry.num_kv_heads, self._share, geometry.head_dim)
        queries, out = q.view(shape), torch.empty_like(q)
        for tile in group.tiles:
            tokens = slice(tile.start, tile.stop)
            weights = self._weights(queries[:, tokens], self._gather(self._keys[layer_id], tile), tile)
            # The values take the keys' place, which is still in the cache.
            values = self._gather(self._values[layer_id], tile)
            if tile.written is not None:  # what is not gets no weight, but 0 * NaN is NaN
                by_row = values.view(group.num_rows, -1, tile.num_keys, geometry.head_dim)
                _clear(by_row[:, :, tile.first_masked :], tile.written[:, None, :, None])
            self._add_up(weights, values, out.view(shape)[:, tokens])
        return out

    def _gather(self, pages: Tensor, tile: QueryTile) -> Tensor:
        """The tile's keys or values of the group's rows in position order, [G * kv, keys, D]."""
        found = self._scratch.take("gathered", (len(tile.records), *pages.shape[1:]), pages.dtype)
        return torch.index_select(pages, 0, tile.records, out=found).view(-1, tile.num_keys, self._geometry.head_dim)

    def _weights(self, queries: Tensor, keys: Tensor, tile: QueryTile) -> Tensor:
        """queries: [G, tokens, kv, heads per kv head, D]; keys: [G * kv, keys, D]. Returns softmax weights
        [G * kv, rows, keys], a row per token and head, padded."""
        num_rows, num_tokens, num_kv_heads, share, head_dim = queries.shape
        num_used = num_tokens * share
        rows = padded_rows(num_used, queries.dtype) if self._exact else num_used
        folded = queries.new_empty(num_rows, num_kv_heads, rows, head_dim)
        folded[:, :, num_used:].zero_()
        folded[:, :, :num_used].view(num_rows, num_kv_heads, num_tokens, share, head_dim).copy_(queries.transpose(1, 2))
        scores = self._scratch.take("scores", (len(keys), rows, tile.num_keys), queries.dtype)
        scores.baddbmm_(folded.flatten(0, 1), keys.transpose(1, 2), beta=0.0, alpha=self._geometry.scale)
        masked = scores.view(num_rows, num_kv_heads, rows, tile.num_keys)[:, :, :num_used, tile.first_masked :]
        if tile.written is not None:  # NaN - inf is NaN
            _clear(masked, tile.written[:, None, None])
        masked.add_(tile.mask)
        return torch.softmax(scores, -1, out=self._scratch.take("weights", tuple(scores.shape), scores.dtype))

    def _add_up(self, weights: Tensor, values: Tensor, out: Tensor) -> None:
        """Weighted values into out [G, tokens, kv, heads per kv head, D]."""
        num_rows, num_tokens, num_kv_heads, share, head_dim = out.shape
        total = _weighted_sum(weights, values)[:, : num_tokens * share]
        out.copy_(total.view(num_rows, num_kv_heads, num_tokens, share, head_dim).transpose(1, 2))


def _write(pool: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> None:
    if not plan.runs:
        pool[plan.write_pages, 0, :, plan.write_offsets] = k
        pool[plan.write_pages, 1, :, plan.write_offsets] = v
    for run in plan.runs:
        tokens = slice(run.first_token, run.first_token + run.num_tokens)
        page = pool[run.page, :, :, run.offset : run.offset + run.num_tokens]
        page[0].copy_(k[tokens].transpose(0, 1))
        page[1].copy_(v[tokens].transpose(0, 1))


def _clear(values: Tensor, kept: Tensor) -> None:
    """Put 0 where `kept` has no bit set, whatever is there: on the bits, in one pass of whole vectors."""
    values.view(bits_of(values.dtype)).bitwise_and_(kept)


def _weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """weights [N, rows, keys] times values [N, keys, D], in spans on a grid of absolute positions."""
    size = span_terms(weights.dtype)
    spans = [slice(start, min(start + size, weights.shape[2])) for start in range(0, weights.shape[2], size)]
    parts = (torch.bmm(weights[:, :, span], values[:, span]) for span in spans)
    total = next(parts)
    if len(spans) == 1:
        return total
    wide = total.float()
    for part in parts:
        wide += part
    return wide.to(total.dtype)
