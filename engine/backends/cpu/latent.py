"""Bit-exact MLA and DSA on the CPU, independent of batching.

Compiled code serves the dtypes that have kernels, plain torch the others. A node of a draft tree
sees the committed keys, its ancestors and itself in the order of plain decoding, and so has its
bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.backends.commit import commit_entries
from engine.backends.cpu.latent_plain import PlainLatents, plan_plainly
from engine.backends.plan import storage_positions, tree_visibility
from engine.backends.selection import true_positions
from engine.contracts.latent import (
    LatentGeometry,
    check_covered,
    check_pages,
    checked_selection,
    entries_of,
)
from engine.core.batch import ForwardBatch
from engine.kernels.host.attention.mla import attend_latent
from engine.kernels.host.attention.sparse_index import select_keys
from engine.kernels.host.codegen.compiled import Team, has_kernels
from engine.kernels.latent_rows import LatentRows
from runtime.errors import InternalError, StalePlanError

_BLOCK = 64  # selections are as wide as the longest row in multiples of this, or `max_selected`


@dataclass(frozen=True)
class LatentPlan:
    """The inputs of `select` and `run` for a batch of R rows and T tokens.

    Attributes:
        own_slots: [T] int64, the destination of each token's entry: page * page_size + offset.
        own_positions: [T] int64, the destinations in storage order.
        most_keys: the number of keys of the longest row.
        rows: the inputs of compiled code, or None.
        plain: the inputs of plain torch, or None.
    """

    num_rows: int
    num_tokens: int
    own_slots: Tensor
    own_positions: Tensor
    most_keys: int
    rows: LatentRows | None
    plain: PlainLatents | None


class CpuLatentAttention:
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
    ) -> None:
        check_pages(latent_pools, geometry)
        self._latent_pools = dict(latent_pools)
        self._index_pools = dict(index_pools)
        self._geometry = geometry
        pools = (*latent_pools.values(), *index_pools.values())
        self._is_compiled = has_kernels(*(pool.dtype for pool in pools))
        # A stage may have recurrent layers only, and then no pools.
        self._num_pages = min((len(pool) for pool in pools), default=None)
        self._team = Team()
        self.num_plans = 0

    def plan(self, batch: ForwardBatch, *, replan_equivalent: bool = False) -> None:
        """Prepare key tables and masks, and mark the batch.

        Raises:
            InternalError: a page is outside the pools, or a row has too few pages for its keys.
        """
        plan = self._build_plan(batch)
        batch.mark_forward_metadata_ready(self, plan=plan, replan_equivalent=replan_equivalent)
        self.num_plans += 1

    def select(
        self, layer_id: int, q: Tensor, k: Tensor, weights: Tensor, batch: ForwardBatch
    ) -> Tensor:
        """Implement `LatentAttentionBackend.select`."""
        plan = self._checked_plan(q, batch)
        keys = entries_of(self._index_pools, layer_id, "index keys")
        keys[plan.own_slots] = k
        width = min(self._geometry.max_selected, -(-plan.most_keys // _BLOCK) * _BLOCK)
        if plan.plain is not None:
            return plan.plain.select(keys, q, weights, width)
        if plan.rows is None or not plan.num_tokens:
            return torch.empty(plan.num_tokens, width, dtype=torch.int32)
        return select_keys(
            self._index_pools[layer_id],
            q.float().contiguous(),
            weights.contiguous(),
            plan.rows,
            count=width,
            team=self._team,
        )

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
            InternalError: also if a token was given a key after its own.
        """
        plan = self._checked_plan(q, batch)
        cached = entries_of(self._latent_pools, layer_id, "latent pages")
        cached[plan.own_slots] = entries
        given = checked_selection(selected, layer_id, plan.num_tokens, self._geometry)
        if plan.plain is not None:
            return plan.plain.attend(cached, q, given, self._geometry)
        if plan.rows is None or not plan.num_tokens:
            return q.new_empty(*q.shape[:2], self._geometry.latent_dim)
        rows = plan.rows if given is None else _seeing(plan, plan.rows, given, layer_id)
        return attend_latent(
            self._latent_pools[layer_id],
            q.contiguous(),
            rows,
            latent_dim=self._geometry.latent_dim,
            scale=self._geometry.scale,
            team=self._team,
        )

    def commit(self, batch: ForwardBatch) -> None:
        """Move the entries of accepted nodes to the positions of plain decoding."""
        commit_entries(
            (*self._latent_pools.values(), *self._index_pools.values()),
            batch,
            self._geometry.page_size,
        )

    def _build_plan(self, batch: ForwardBatch) -> LatentPlan:
        size = self._geometry.page_size
        token_rows, positions = storage_positions(batch)
        lengths = [
            context + query
            for context, query in zip(batch.context_lens, batch.query_lens, strict=True)
        ]
        tables = batch.page_tables.int().contiguous()
        most_keys = max(lengths, default=0)
        if most_keys > tables.shape[1] * size:
            raise InternalError(f"a row of {most_keys} keys has {tables.shape[1]} pages of {size}")
        num_pages = self._num_pages
        if (
            self._is_compiled
            and num_pages is not None
            and tables.numel()
            and not (0 <= tables.min() <= tables.max() < num_pages)
        ):
            raise InternalError(
                f"the pools have {num_pages} pages, the page tables name {tables.tolist()}"
            )
        slots = tables[token_rows, positions // size].long() * size + positions % size
        rows = None
        plain = None
        if self._is_compiled:
            rows = _latent_rows(batch, lengths, tables, token_rows, positions)
        else:
            plain = plan_plainly(batch, self._geometry, token_rows, positions, slots)
        return LatentPlan(
            num_rows=batch.num_rows,
            num_tokens=len(positions),
            own_slots=slots,
            own_positions=positions,
            most_keys=most_keys,
            rows=rows,
            plain=plain,
        )

    def _checked_plan(self, q: Tensor, batch: ForwardBatch) -> LatentPlan:
        plan = batch.forward_metadata_plan
        if batch.forward_metadata_planner is not self or not isinstance(plan, LatentPlan):
            raise StalePlanError("the batch was not planned by this attention backend")
        check_covered(batch, (plan.num_rows, plan.num_tokens), q)
        return plan


def _latent_rows(
    batch: ForwardBatch, lengths: list[int], tables: Tensor, token_rows: Tensor, positions: Tensor
) -> LatentRows:
    num_common = positions + 1
    listed = torch.empty(len(positions), 0, dtype=torch.int32)
    visibility = tree_visibility(batch)
    if visibility:
        firsts = torch.tensor(
            [length - visible.shape[1] for length, visible in zip(lengths, visibility, strict=True)]
        )
        num_common = firsts[token_rows]
        widest = max(visible.shape[1] for visible in visibility)
        parts = [true_positions(visible, visible.shape[1]) for visible in visibility]
        listed = torch.cat([F.pad(part, (0, widest - part.shape[1]), value=-1) for part in parts])
        listed = torch.where(listed < 0, listed, listed + num_common[:, None].int()).contiguous()
    return LatentRows(
        starts=torch.tensor([0, *accumulate(batch.query_lens)]),
        contexts=torch.tensor(batch.context_lens, dtype=torch.long),
        tables=tables,
        token_rows=token_rows,
        num_common=num_common,
        listed=listed,
    )


def _seeing(plan: LatentPlan, rows: LatentRows, selected: Tensor, layer_id: int) -> LatentRows:
    """Return the rows with the selected keys as the visible ones.

    The keys are checked here, because compiled code reads any position without a check.

    Raises:
        InternalError: a token has no key, or one after its own.
    """
    if (selected > plan.own_positions[:, None]).any() or (selected < 0).all(1).any():
        raise InternalError(f"layer {layer_id}: a token was given no key, or one after its own")
    return LatentRows(
        starts=rows.starts,
        contexts=rows.contexts,
        tables=rows.tables,
        token_rows=rows.token_rows,
        num_common=torch.zeros_like(rows.num_common),
        listed=selected.int().contiguous(),
    )
