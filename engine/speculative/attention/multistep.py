"""Attention for the steps in which a draft extends its trees, planned once per round.

All branches of a row see the row's committed slots, which do not change during a round, and each
sees its own path of earlier steps. The committed keys are gathered once per round, and the keys of
each step are appended. A change of the frontier moves no key: only the visibility of keys per
branch changes. Nothing is written to the pool, so drafted tokens leave no trace in it.

Legend: R rows, K branches per row, L longest committed row (whole pages), S = L + K * `MAX_STEPS`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.contracts.attention import AttentionGeometry, refuse_sinks
from engine.core.batch import ForwardBatch
from engine.speculative.contracts.config import MAX_STEPS
from runtime.errors import InternalError, StalePlanError


@dataclass
class _RoundKeys:
    """The keys and values of one layer in a round, [R, kv, S, D].

    Committed ones come first, then those of each completed step.
    """

    keys: Tensor
    values: Tensor
    num_steps: int = 0


@dataclass(frozen=True)
class RoundPlan:
    """The plan of one round.

        tables  [R, P] int64, pages of L slots
        seen    [R, K, S] bool, the keys that each branch sees; updated when branches change

    `layers` is filled during the round.
    """

    num_branches: int
    tables: Tensor
    num_committed: int
    seen: Tensor
    layers: dict[int, _RoundKeys] = field(default_factory=dict)


class MultiStepAttention:
    """An `AttentionBackend` for multi-step batches of a draft.

    A row has K consecutive tokens, one per branch.
    """

    def __init__(self, *, kv_pools: Mapping[int, Tensor], geometry: AttentionGeometry) -> None:
        self._pools = dict(kv_pools)
        self._geometry = geometry
        self.num_plans = 0

    def plan(self, batch: ForwardBatch, *, replan_equivalent: bool = False) -> None:
        """Plan all steps of the round that begins with this batch, and mark the batch.

        Raises:
            StalePlanError: the batch has a plan. A new plan in the middle of a round would lose the
                paths.
            InternalError: the rows have different numbers of branches.
        """
        branches = num_branches_of(batch, replan_equivalent=replan_equivalent)
        tables = committed_pages(batch, self._geometry.page_size)
        device = next(iter(self._pools.values())).device
        num_committed = tables.shape[1] * self._geometry.page_size
        committed = torch.arange(num_committed) < torch.tensor(batch.context_lens)[:, None]
        own = torch.eye(branches, dtype=torch.bool).repeat(1, MAX_STEPS)
        seen = torch.cat(
            [committed[:, None].expand(-1, branches, -1), own.expand(batch.num_rows, -1, -1)], -1
        )
        plan = RoundPlan(branches, tables.to(device), num_committed, seen.to(device))
        batch.mark_forward_metadata_ready(self, plan=plan)
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
        """Add k, v to the branches' paths and attend.

        Shapes are those of `AttentionBackend.run`, with T = R * K.
        """
        refuse_sinks(sinks)
        plan = self._checked_plan(batch)
        geometry = self._geometry
        rows = batch.num_rows
        branches = plan.num_branches
        heads = geometry.num_kv_heads
        dim = geometry.head_dim
        group = geometry.num_heads // heads
        shape = rows, branches, heads, dim
        layer, end = self._extended(plan, layer_id, k.view(shape), v.view(shape))
        # [R, kv, K * group, D]
        queries = q.view(rows, branches, heads, group, dim).transpose(1, 2).flatten(2, 3)
        seen = plan.seen[:, None, :, :end]
        if branches > 1:
            seen = seen.repeat_interleave(group, 2)
        out = F.scaled_dot_product_attention(
            queries,
            layer.keys[:, :, :end],
            layer.values[:, :, :end],
            attn_mask=seen,
            scale=geometry.scale,
        )
        return (
            out.view(rows, heads, branches, group, dim)
            .transpose(1, 2)
            .reshape(-1, geometry.num_heads, dim)
        )

    def reorder(self, batch: ForwardBatch, parents: Tensor) -> None:
        """Continue the branches at `parents` [R, K] of the last step in the next one."""
        plan = self._checked_plan(batch)
        end = plan.num_committed + plan.num_branches * max(
            layer.num_steps for layer in plan.layers.values()
        )
        done = plan.seen[:, :, plan.num_committed : end]
        done.copy_(done.gather(1, parents[:, :, None].expand_as(done)))

    def _checked_plan(self, batch: ForwardBatch) -> RoundPlan:
        plan = batch.forward_metadata_plan
        if batch.forward_metadata_planner is not self or not isinstance(plan, RoundPlan):
            raise StalePlanError("the batch was not planned by this multi-step attention")
        if (batch.num_rows, batch.num_tokens) != (
            len(plan.tables),
            len(plan.tables) * plan.num_branches,
        ):
            raise StalePlanError(
                f"planned for {len(plan.tables)} rows of {plan.num_branches} branches, the batch has "
                f"{batch.num_rows} rows and {batch.num_tokens} tokens"
            )
        return plan

    def _extended(
        self, plan: RoundPlan, layer_id: int, k: Tensor, v: Tensor
    ) -> tuple[_RoundKeys, int]:
        """Append k, v [R, K, kv, D] to the layer's keys. Return the layer and its slot count."""
        layer = plan.layers.get(layer_id)
        if layer is None:
            pages = self._pools[layer_id][plan.tables]  # [R, P, 2, kv, page, D]
            committed = pages.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
            # Memory that was never written may be NaN, which a mask does not remove.
            hidden = plan.seen[:, 0, : plan.num_committed].logical_not()[:, None, :, None]
            keys, values = F.pad(
                committed.masked_fill(hidden, 0.0), (0, 0, 0, plan.num_branches * MAX_STEPS)
            )
            plan.layers[layer_id] = layer = _RoundKeys(keys, values)
        if layer.num_steps == MAX_STEPS:
            raise InternalError(f"a round has at most {MAX_STEPS} steps")
        start = plan.num_committed + layer.num_steps * plan.num_branches
        end = start + plan.num_branches
        layer.keys[:, :, start:end], layer.values[:, :, start:end] = (
            k.transpose(1, 2),
            v.transpose(1, 2),
        )
        layer.num_steps += 1
        return layer, end


def num_branches_of(batch: ForwardBatch, *, replan_equivalent: bool) -> int:
    """Return the branches per row of a round that is about to be planned.

    It raises the errors of `MultiStepAttention.plan`.
    """
    if batch.forward_metadata_ready or replan_equivalent:
        raise StalePlanError("the steps of a round are planned once, before the first")
    branches = set(batch.query_lens)
    if len(branches) != 1:
        raise InternalError(f"rows of a round have one number of branches, got {sorted(branches)}")
    return branches.pop()


def committed_pages(batch: ForwardBatch, page_size: int) -> Tensor:
    """Return the pages of each row's committed slots, [R, P] int64."""
    return batch.page_tables[:, : -(-max(batch.context_lens) // page_size)].long()
