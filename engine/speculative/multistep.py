"""Attention of the steps in which a draft grows its trees: planned once for all steps of a round.

All branches of a row look at the row's committed slots, which do not change during a round, and each at its own path of
earlier steps. The committed keys are gathered once per round; the paths are kept beside them and follow their branches
when the frontier is chosen anew. Nothing is written to the pool: what was drafted leaves no trace in it.

Legend: R rows, K branches per row, L longest committed row (whole pages), s steps done.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.contracts.attention import AttentionGeometry
from engine.core.batch import ForwardBatch
from runtime.errors import InternalError, StalePlanError


@dataclass
class _Paths:
    """Keys and values of one layer in a round: committed [R, kv, L, D], and of the branches [R, K, kv, s, D]."""

    keys: Tensor
    values: Tensor
    path_keys: Tensor
    path_values: Tensor


@dataclass(frozen=True)
class RoundPlan:
    """One round. tables: [R, P] int64 pages; hidden: [R, 1, 1, L] bool, True past a row's committed slots.

    `layers` fills as the round goes; the rest never changes.
    """

    num_branches: int
    tables: Tensor
    hidden: Tensor
    layers: dict[int, _Paths] = field(default_factory=dict)


class MultiStepAttention:
    """An `AttentionBackend` for the multi-step batches of a draft: K consecutive tokens per row, one per branch."""

    def __init__(self, *, kv_pools: Mapping[int, Tensor], geometry: AttentionGeometry) -> None:
        self._pools = dict(kv_pools)
        self._geometry = geometry
        self.num_plans = 0

    def plan(self, batch: ForwardBatch, *, replan_equivalent: bool = False) -> None:
        """Plan all steps of the round that begins with this batch and mark it.

        Raises:
            StalePlanError: the batch has a plan already. Planning again in the middle of a round would lose the paths.
            InternalError: rows with different numbers of branches.
        """
        branches = num_branches_of(batch, replan_equivalent=replan_equivalent)
        tables = committed_pages(batch, self._geometry.page_size)
        device = next(iter(self._pools.values())).device
        lengths = torch.tensor(batch.context_lens)
        hidden = torch.arange(tables.shape[1] * self._geometry.page_size) >= lengths[:, None]
        plan = RoundPlan(branches, tables.to(device), hidden[:, None, None].to(device))
        batch.mark_forward_metadata_ready(self, plan=plan)
        self.num_plans += 1

    def run(self, layer_id: int, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch) -> Tensor:
        """Add k, v to the branches' paths and attend. Shapes as in `AttentionBackend.run`, T = R * K."""
        plan, geometry = self._checked_plan(batch), self._geometry
        rows, heads, dim = batch.num_rows, geometry.num_kv_heads, geometry.head_dim
        group = geometry.num_heads // heads
        paths = self._extended(plan, layer_id, k.view(rows, -1, heads, 1, dim), v.view(rows, -1, heads, 1, dim))
        queries = q.view(rows, -1, heads, group, dim) * geometry.scale
        by_row = queries.transpose(1, 2).flatten(2, 3)  # [R, kv, K * group, D]
        committed = (by_row @ paths.keys.transpose(-1, -2)).float().masked_fill(plan.hidden, float("-inf"))
        own = (queries @ paths.path_keys.transpose(-1, -2)).float()  # [R, K, kv, group, s]
        own = own.transpose(1, 2).flatten(2, 3)
        weights = torch.cat([committed, own], -1).softmax(-1).to(q.dtype)
        seen = committed.shape[-1]
        out = (weights[..., :seen] @ paths.values).view(rows, heads, -1, group, dim).transpose(1, 2)
        own_weights = weights[..., seen:].view(rows, heads, -1, group, own.shape[-1]).transpose(1, 2)
        return (out + own_weights @ paths.path_values).reshape(-1, geometry.num_heads, dim)

    def reorder(self, batch: ForwardBatch, parents: Tensor) -> None:
        """The next step's branches continue those at `parents` [R, K] of the last."""
        index = parents[:, :, None, None, None]
        for paths in self._checked_plan(batch).layers.values():
            whole = index.expand_as(paths.path_keys)
            paths.path_keys = paths.path_keys.gather(1, whole)
            paths.path_values = paths.path_values.gather(1, whole)

    def _checked_plan(self, batch: ForwardBatch) -> RoundPlan:
        plan = batch.forward_metadata_plan
        if batch.forward_metadata_planner is not self or not isinstance(plan, RoundPlan):
            raise StalePlanError("the batch was not planned by this multi-step attention")
        if (batch.num_rows, batch.num_tokens) != (len(plan.tables), len(plan.tables) * plan.num_branches):
            raise StalePlanError(f"planned for {len(plan.tables)} rows of {plan.num_branches} branches, the batch has "
                                 f"{batch.num_rows} rows and {batch.num_tokens} tokens")
        return plan

    def _extended(self, plan: RoundPlan, layer_id: int, k: Tensor, v: Tensor) -> _Paths:
        paths = plan.layers.get(layer_id)
        if paths is None:
            pages = self._pools[layer_id][plan.tables]  # [R, P, 2, kv, page, D]
            keys, values = pages.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
            # What was never written may be NaN, and 0 * NaN is not 0.
            values = values.masked_fill(plan.hidden.transpose(-1, -2), 0.0)
            plan.layers[layer_id] = paths = _Paths(keys, values, k, v)
        else:
            paths.path_keys = torch.cat([paths.path_keys, k], 3)
            paths.path_values = torch.cat([paths.path_values, v], 3)
        return paths


def num_branches_of(batch: ForwardBatch, *, replan_equivalent: bool) -> int:
    """Branches per row of a round that is about to be planned. Raises as `MultiStepAttention.plan` does."""
    if batch.forward_metadata_ready or replan_equivalent:
        raise StalePlanError("the steps of a round are planned once, before the first")
    branches = set(batch.query_lens)
    if len(branches) != 1:
        raise InternalError(f"rows of a round have one number of branches, got {sorted(branches)}")
    return branches.pop()


def committed_pages(batch: ForwardBatch, page_size: int) -> Tensor:
    """[R, P] int64: the pages of each row's committed slots."""
    return batch.page_tables[:, :-(-max(batch.context_lens) // page_size)].long()
