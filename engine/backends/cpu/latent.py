"""MLA and DSA on the CPU in plain torch, bit-exact under any batching.

Each token gathers its own keys in position order into blocks of a fixed size; products have a fixed inner shape and
blocks are added in order. So a token's bits depend on its own keys only, and a choice of keys costs what it reads.
A node of a draft tree gathers the committed keys, its ancestors and itself side by side: the bits of plain decoding.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.backends.commit import commit_entries
from engine.backends.plan import storage_positions
from engine.backends.selection import best_positions, true_positions
from engine.backends.visibility import tree_visibility
from engine.contracts.latent import LatentGeometry, check_covered, check_pages, checked_selection, entries_of
from engine.core.batch import ForwardBatch
from engine.core.numerics import padded_rows
from runtime.errors import StalePlanError

_BLOCK = 64  # keys per product
_TILE_ELEMENTS = 1 << 24  # bounds the memory of one step: tokens are taken a few at a time


@dataclass(frozen=True)
class LatentPlan:
    """What `select` and `run` need of a batch. R rows, T tokens, K keys of the longest row, whole blocks.

    token_rows     [T] int64
    own_slots      [T] int64, where the token's entry is written: page * page_size + offset
    key_slots      [R, K] int64, where the row's keys are
    hidden         [T, K] bool, True where the token must not see the key
    visible        [T, K] int32, the other keys, ascending, then -1; only where no layer selects its own
    """

    num_rows: int
    num_tokens: int
    token_rows: Tensor
    own_slots: Tensor
    key_slots: Tensor
    hidden: Tensor
    visible: Tensor | None


class CpuLatentAttention:
    """A `LatentAttentionBackend` over latent pools [num_pages, page_size, entry_dim] and, on layers that choose,
    index-key pools [num_pages, page_size, index_head_dim], by layer id."""

    def __init__(self, *, latent_pools: Mapping[int, Tensor], index_pools: Mapping[int, Tensor],
                 geometry: LatentGeometry) -> None:
        check_pages(latent_pools, geometry)
        self._latent_pools = dict(latent_pools)
        self._index_pools = dict(index_pools)
        self._geometry = geometry
        self.num_plans = 0

    def plan(self, batch: ForwardBatch, *, replan_equivalent: bool = False) -> None:
        """Prepare key tables and masks and mark the batch."""
        plan = _build_plan(batch, self._geometry)
        batch.mark_forward_metadata_ready(self, plan=plan, replan_equivalent=replan_equivalent)
        self.num_plans += 1

    def select(self, layer_id: int, q: Tensor, k: Tensor, weights: Tensor, batch: ForwardBatch) -> Tensor:
        """See `LatentAttentionBackend.select`."""
        plan = self._checked_plan(q, batch)
        keys = entries_of(self._index_pools, layer_id, "index keys")
        keys[plan.own_slots] = k
        num_heads, head_dim = q.shape[1:]
        num_keys = plan.key_slots.shape[1]
        width = min(self._geometry.max_selected, num_keys)
        chosen = [torch.empty(0, width, dtype=torch.int32)]
        for row, tokens in _row_tiles(plan, elements_per_token=num_heads * num_keys):
            blocks = keys[plan.key_slots[row]].view(-1, _BLOCK, head_dim)
            scores, hidden = _index_scores(q[tokens].float(), blocks.float(), weights[tokens]), plan.hidden[tokens]
            chosen.append(best_positions(scores.masked_fill(hidden, float("-inf")), hidden, width))
        return torch.cat(chosen)

    def run(self, layer_id: int, q: Tensor, entries: Tensor, selected: Tensor | None, batch: ForwardBatch) -> Tensor:
        """See `LatentAttentionBackend.run`."""
        plan = self._checked_plan(q, batch)
        cached = entries_of(self._latent_pools, layer_id, "latent pages")
        cached[plan.own_slots] = entries
        given = checked_selection(selected, layer_id, plan.num_tokens, self._geometry)
        selected = plan.visible if given is None else given
        assert selected is not None, "a model that does not choose is planned with what its tokens see"
        selected = F.pad(selected, (0, -selected.shape[1] % _BLOCK), value=-1).long()
        hidden = selected < 0
        # A place without a key reads the token's own entry: it is always written, and it is masked.
        slots = plan.key_slots[plan.token_rows[:, None], selected.clamp(min=0)]
        slots = torch.where(hidden, plan.own_slots[:, None], slots)
        out = q.new_empty(*q.shape[:2], self._geometry.latent_dim)
        step = max(1, _TILE_ELEMENTS // max(1, slots.shape[1] * self._geometry.entry_dim))
        for start in range(0, plan.num_tokens, step):
            tokens = slice(start, start + step)
            out[tokens] = self._attend(q[tokens], cached[slots[tokens]], hidden[tokens])
        return out

    def commit(self, batch: ForwardBatch) -> None:
        """Move the entries of accepted nodes to where plain decoding would have stored them."""
        commit_entries((*self._latent_pools.values(), *self._index_pools.values()), batch, self._geometry.page_size)

    def _attend(self, q: Tensor, keys: Tensor, hidden: Tensor) -> Tensor:
        """q: [M, heads, entry]; keys: [M, K, entry]; hidden: [M, K]. Returns [M, heads, latent]."""
        geometry = self._geometry
        num_tokens, num_heads = q.shape[:2]
        rows = padded_rows(num_heads, q.dtype)
        blocks = keys.view(num_tokens, -1, _BLOCK, geometry.entry_dim)
        queries = F.pad(q, (0, 0, 0, rows - num_heads))[:, None].expand(-1, blocks.shape[1], -1, -1).flatten(0, 1)
        blocks = blocks.flatten(0, 1)  # [M * blocks, 64, entry]
        scores = torch.bmm(queries, blocks.transpose(1, 2)).float() * geometry.scale
        scores.masked_fill_(hidden.view(-1, 1, _BLOCK), float("-inf"))
        scores = scores.view(num_tokens, -1, rows, _BLOCK)
        weights = torch.exp(scores - scores.amax((1, 3), keepdim=True))
        parts = torch.bmm(weights.to(q.dtype).flatten(0, 1), blocks[..., :geometry.latent_dim])
        total = _sum_in_order(parts.float().view(num_tokens, -1, rows, geometry.latent_dim))
        total = total / _sum_in_order(weights.sum(-1))[..., None]
        return total[:, :num_heads].to(q.dtype)

    def _checked_plan(self, q: Tensor, batch: ForwardBatch) -> LatentPlan:
        plan = batch.forward_metadata_plan
        if batch.forward_metadata_planner is not self or not isinstance(plan, LatentPlan):
            raise StalePlanError("the batch was not planned by this attention backend")
        check_covered(batch, (plan.num_rows, plan.num_tokens), q)
        return plan


def _build_plan(batch: ForwardBatch, geometry: LatentGeometry) -> LatentPlan:
    page_size = geometry.page_size
    rows, positions = storage_positions(batch)
    lengths = [context + query for context, query in zip(batch.context_lens, batch.query_lens, strict=True)]
    key_ids = torch.arange(-(-max(lengths, default=0) // _BLOCK) * _BLOCK)
    tables = batch.page_tables.long()
    missing = -(-len(key_ids) // page_size) - tables.shape[1]
    tables = F.pad(tables, (0, max(0, missing)))
    slots = tables[:, key_ids // page_size] * page_size + key_ids % page_size
    hidden = key_ids[None, :] > positions[:, None]
    start = 0
    for visible, length in zip(tree_visibility(batch), lengths, strict=False):
        num_tokens, width = visible.shape
        hidden[start:start + num_tokens] = key_ids >= length
        hidden[start:start + num_tokens, length - width:length] = ~visible
        start += num_tokens
    return LatentPlan(num_rows=batch.num_rows, num_tokens=len(positions), token_rows=rows,
                      own_slots=slots[rows, positions], key_slots=slots, hidden=hidden,
                      visible=None if geometry.max_selected else true_positions(~hidden, hidden.shape[1]))


def _row_tiles(plan: LatentPlan, *, elements_per_token: int) -> Iterator[tuple[int, slice]]:
    """Runs of tokens of one row, short enough to bound memory."""
    step = max(1, _TILE_ELEMENTS // max(1, elements_per_token))
    start = 0
    for row, count in enumerate(torch.bincount(plan.token_rows, minlength=plan.num_rows).tolist()):
        for first in range(start, start + count, step):
            yield row, slice(first, min(first + step, start + count))
        start += count


def _index_scores(q: Tensor, blocks: Tensor, weights: Tensor) -> Tensor:
    """q: [M, heads, dim]; blocks: [B, 64, dim]; weights: [M, heads]; all fp32. Returns [M, B * 64]."""
    num_tokens, num_heads, head_dim = q.shape
    num_rows = num_tokens * num_heads
    rows = F.pad(q.flatten(0, 1), (0, 0, 0, padded_rows(num_rows, q.dtype) - num_rows))
    products = torch.bmm(rows.expand(len(blocks), -1, -1), blocks.transpose(1, 2))[:, :num_rows]
    products = F.relu(products * head_dim**-0.5).view(-1, num_tokens, num_heads, _BLOCK)
    weighted = products * weights[:, :, None]
    return _sum_in_order(weighted.transpose(1, 2)).transpose(0, 1).flatten(1)


def _sum_in_order(x: Tensor) -> Tensor:
    """Sum over axis 1, first to last: library sums choose their own order by shape."""
    total = x[:, 0].clone()
    for index in range(1, x.shape[1]):
        total += x[:, index]
    return total
