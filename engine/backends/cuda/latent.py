"""MLA and DSA on a device: FlashInfer for causal order, a Triton kernel for trees and selections.

FlashInfer's wrapper for compressed keys has no masks and no key selection. If a token does not see
all keys before it, its keys are listed and the kernel attends to the list. As in paged attention
(`flashinfer.py`), a wrapper keeps its last plan only. So plans are counted, and each wrapper exists
twice.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.backends.commit import commit_entries
from engine.backends.cuda.latent_wrappers import LatentWrapper, LatentWrapperFactory
from engine.backends.cuda.wrappers import Slot
from engine.backends.plan import storage_positions, tree_visibility
from engine.backends.selection import best_positions, true_positions
from engine.contracts.latent import (
    LatentGeometry,
    check_covered,
    check_pages,
    checked_selection,
    entries_of,
)
from engine.core.batch import ForwardBatch
from engine.memory.static import Fence
from runtime.errors import StalePlanError

_IN_FLIGHT = 2  # batches that may be planned and not yet run
# bounds the memory of index scores, which are computed for a few tokens at a time
_SCORE_ELEMENTS = 1 << 26


class LatentKernels(Protocol):
    """The kernels of `engine.kernels.device.latent`, which needs Triton."""

    @property
    def listed_attention(self) -> Callable[..., Tensor]: ...

    @property
    def index_scores(self) -> Callable[..., Tensor]: ...


@dataclass(frozen=True)
class DeviceLatentPlan:
    """The inputs of `select` and `run`, on the device.

    The batch has T tokens in R rows; K is the number of keys of the longest row.

    Attributes:
        token_rows: [T] int64.
        own_slots: [T] int64, the destination of each token's entry: page * page_size + offset.
        tables: [R, pages] int64.
        lengths: [T] int64, the number of keys of the token's row.
        visible: [T, K] bool, if no wrapper is planned.
        listed: [T, K] int32 slots of the visible keys, ascending, padded with -1, if no layer
            selects.
        slot, epoch: the planned wrapper, if the order is causal and no layer selects.
    """

    num_rows: int
    num_tokens: int
    token_rows: Tensor
    own_slots: Tensor
    tables: Tensor
    lengths: Tensor
    visible: Tensor | None
    listed: Tensor | None
    slot: Slot[LatentWrapper] | None
    epoch: int


class DeviceLatentAttention:
    """A `LatentAttentionBackend` over latent and index-key pools, by layer id.

    Latent pools are [num_pages, page_size, entry_dim]. Index-key pools, on selecting layers, are
    [num_pages, page_size, index_head_dim].
    """

    def __init__(
        self,
        *,
        latent_pools: Mapping[int, Tensor],
        index_pools: Mapping[int, Tensor],
        geometry: LatentGeometry,
        wrappers: LatentWrapperFactory | None,
        device: torch.device,
        kernels: LatentKernels,
    ) -> None:
        """Create a backend.

        Without `wrappers` (FlashInfer has none for this geometry) keys are also listed for causal
        order.
        """
        check_pages(latent_pools, geometry)
        self._latent_pools = dict(latent_pools)
        self._index_pools = dict(index_pools)
        self._geometry = geometry
        self._device = device
        self._kernels = kernels
        self._dtype = next(iter(latent_pools.values())).dtype if latent_pools else torch.bfloat16
        self._causal = (
            None
            if wrappers is None
            else itertools.cycle(
                [Slot(wrappers.latent(), Fence(device)) for _ in range(_IN_FLIGHT)]
            )
        )
        self.num_plans = 0

    def plan(self, batch: ForwardBatch, *, replan_equivalent: bool = False) -> None:
        """Plan the destinations of keys and a wrapper or lists of keys, and mark the batch.

        Raises:
            InternalError: a tree has another size than its row.
        """
        size = self._geometry.page_size
        device = self._device
        rows, positions = storage_positions(batch)
        tables = batch.page_tables.cpu().long()
        token_rows = rows.to(device)
        tables_there = tables.to(device)
        lengths = torch.tensor(
            [
                context + query
                for context, query in zip(batch.context_lens, batch.query_lens, strict=True)
            ],
            dtype=torch.long,
        )
        masks = tree_visibility(batch)
        visible = None
        listed = None
        slot = None
        if masks or self._geometry.max_selected or self._causal is None:
            visible = _visible(
                batch, masks, positions.to(device), int(lengths.max()) if len(lengths) else 0
            )
        elif len(positions):
            slot = self._schedule(next(self._causal), batch, lengths, tables)
        if visible is not None and not self._geometry.max_selected:
            listed = _slots(
                tables_there, token_rows, true_positions(visible, visible.shape[1]), size
            )
        plan = DeviceLatentPlan(
            num_rows=batch.num_rows,
            num_tokens=len(positions),
            token_rows=token_rows,
            tables=tables_there,
            own_slots=(tables[rows, positions // size] * size + positions % size).to(device),
            lengths=lengths[rows].to(device),
            visible=visible,
            listed=listed,
            slot=slot,
            epoch=0 if slot is None else slot.epoch,
        )
        batch.mark_forward_metadata_ready(self, plan=plan, replan_equivalent=replan_equivalent)
        self.num_plans += 1

    def select(
        self, layer_id: int, q: Tensor, k: Tensor, weights: Tensor, batch: ForwardBatch
    ) -> Tensor:
        """Implement `LatentAttentionBackend.select`."""
        plan = self._checked_plan(q, batch)
        keys = entries_of(self._index_pools, layer_id, "index keys")
        keys[plan.own_slots] = k
        assert plan.visible is not None, (
            "batches of a model with key selection are planned with visible keys"
        )
        num_keys = plan.visible.shape[1]
        width = min(self._geometry.max_selected, num_keys)
        chosen = [torch.empty(0, width, dtype=torch.int32, device=q.device)]
        step = max(1, _SCORE_ELEMENTS // max(1, num_keys))
        for start in range(0, plan.num_tokens, step):
            tokens = slice(start, start + step)
            hidden = ~plan.visible[tokens]
            scores = self._kernels.index_scores(
                q[tokens].contiguous(),
                keys,
                weights[tokens].float().contiguous(),
                plan.tables,
                plan.token_rows[tokens],
                plan.lengths[tokens],
                num_keys=num_keys,
                page_size=self._geometry.page_size,
            )
            chosen.append(best_positions(scores.masked_fill_(hidden, float("-inf")), hidden, width))
        return torch.cat(chosen)

    def run(
        self,
        layer_id: int,
        q: Tensor,
        entries: Tensor,
        selected: Tensor | None,
        batch: ForwardBatch,
    ) -> Tensor:
        """Implement `LatentAttentionBackend.run`.

        Raises:
            StalePlanError: also if the batch's wrapper was planned for another batch since.
        """
        plan = self._checked_plan(q, batch)
        cached = entries_of(self._latent_pools, layer_id, "latent pages")
        cached[plan.own_slots] = entries
        selected = checked_selection(selected, layer_id, plan.num_tokens, self._geometry)
        latent_dim = self._geometry.latent_dim
        scale = self._geometry.scale
        if selected is not None:
            listed = _slots(plan.tables, plan.token_rows, selected, self._geometry.page_size)
            return self._kernels.listed_attention(
                q.contiguous(), cached, listed, latent_dim=latent_dim, scale=scale
            )
        if plan.listed is not None:
            return self._kernels.listed_attention(
                q.contiguous(), cached, plan.listed, latent_dim=latent_dim, scale=scale
            )
        if plan.slot is None:
            return q.new_empty(*q.shape[:2], latent_dim)
        pool = self._latent_pools[layer_id]
        return plan.slot.wrapper.run(
            q[..., :latent_dim], q[..., latent_dim:], pool[..., :latent_dim], pool[..., latent_dim:]
        )

    def commit(self, batch: ForwardBatch) -> None:
        """Move the entries of accepted nodes to the positions of plain decoding."""
        commit_entries(
            (*self._latent_pools.values(), *self._index_pools.values()),
            batch,
            self._geometry.page_size,
        )

    def _schedule(
        self, slot: Slot[LatentWrapper], batch: ForwardBatch, lengths: Tensor, tables: Tensor
    ) -> Slot[LatentWrapper]:
        """Plan the wrapper for the rows with tokens."""
        geometry = self._geometry
        rows = [row for row, length in enumerate(batch.query_lens) if length]
        num_pages = -(-lengths[rows] // geometry.page_size)
        indices = torch.cat(
            [tables[row, :num] for row, num in zip(rows, num_pages.tolist(), strict=True)]
        )
        slot.next_epoch()
        slot.wrapper.plan(
            _offsets(torch.tensor([batch.query_lens[row] for row in rows])),
            _offsets(num_pages),
            indices.int().to(self._device),
            lengths[rows].int(),
            geometry.num_heads,
            geometry.latent_dim,
            geometry.rope_dim,
            geometry.page_size,
            True,  # noqa: FBT003
            geometry.scale,
            self._dtype,
            self._dtype,
        )
        slot.planned.set()
        return slot

    def _checked_plan(self, q: Tensor, batch: ForwardBatch) -> DeviceLatentPlan:
        plan = batch.forward_metadata_plan
        if batch.forward_metadata_planner is not self or not isinstance(plan, DeviceLatentPlan):
            raise StalePlanError("the batch was not planned by this attention backend")
        check_covered(batch, (plan.num_rows, plan.num_tokens), q)
        if plan.slot is not None and plan.slot.epoch != plan.epoch:
            raise StalePlanError("the wrapper was planned for another batch since")
        return plan


def _offsets(lengths: Tensor) -> Tensor:
    """Return the starts of the rows and the end, [R + 1] int32."""
    return F.pad(lengths.cumsum(0), (1, 0)).int()


def _slots(tables: Tensor, token_rows: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Convert key positions [T, n] of each token's row to slots [T, n] int32; -1 stays -1."""
    pages = tables[token_rows[:, None], positions.clamp(min=0).long() // page_size]
    return torch.where(positions < 0, -1, pages * page_size + positions % page_size).int()


def _visible(
    batch: ForwardBatch, masks: tuple[Tensor, ...], positions: Tensor, num_keys: int
) -> Tensor:
    """Return the visible keys as [T, num_keys] bool on the device of `positions`.

    `positions` [T] are the storage positions of the tokens. Only the masks themselves are copied to
    the device.
    """
    device = positions.device
    key_ids = torch.arange(num_keys, device=positions.device)
    if not masks:
        return key_ids <= positions[:, None]
    width = max(mask.shape[1] for mask in masks)
    firsts = []  # first key that the mask of a token's row covers
    for query_len, context_len in zip(batch.query_lens, batch.context_lens, strict=True):
        firsts += [context_len] * query_len
    spoken = torch.cat([F.pad(mask, (0, width - mask.shape[1])) for mask in masks]).to(device)
    places = key_ids - torch.tensor(firsts, device=device)[:, None]
    seen = spoken.gather(1, places.clamp(0, width - 1))
    return (places < 0) | (seen & (places < width))
