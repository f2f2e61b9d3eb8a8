"""Attention for the steps in which a draft extends its trees, on the host, as launches only.

Committed keys are read in their pages. Drafted keys are written to the null page, where each branch
reads its own path. It works as `engine/speculative/attention/multistep.py`, but no shape depends on
the length of a row and no memory is allocated, so a whole round can be recorded. No request owns
the null page, and its contents have no meaning after the round.

Legend: R rows, K branches per row, T = R * K, S steps of a round after its first level.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from engine.backends.cpu.attention import attend
from engine.contracts.attention import AttentionGeometry
from engine.core.batch import ForwardBatch
from engine.kernels.host.codegen.compiled import Team, dense_tokens
from engine.kernels.host.tokens.kv_writes import write_tokens
from engine.kernels.rows_in_place import RowsInPlace
from engine.memory.layout import NULL_INDEX
from engine.speculative.attention.multistep import num_branches_of
from runtime.errors import InternalError, StalePlanError


@dataclass(frozen=True)
class RoundReads:
    """The inputs of compiled code in a round.

    rows            rows of the first step
    positions       [S, T] int32, of each step's tokens, as in `RowsInPlace`
    pages, offsets  [S, T] int64, the destinations of their keys
    """

    rows: RowsInPlace
    positions: Tensor
    pages: Tensor
    offsets: Tensor


@dataclass(frozen=True)
class PagedRoundPlan:
    """The plan of one round. `num_done` counts the completed steps by layer."""

    num_rows: int
    num_branches: int
    reads: RoundReads
    num_done: dict[int, int] = field(default_factory=dict)


class PagedRounds:
    """A `RoundAttention` for rounds that fit on the null page."""

    def __init__(self, *, kv_pools: Mapping[int, Tensor], geometry: AttentionGeometry) -> None:
        self._pools = dict(kv_pools)
        self._geometry = geometry
        self._team = Team()
        self.num_plans = 0

    def has_room(self, num_tokens: int, num_steps: int) -> bool:
        """Return whether a round fits: tokens per step, and steps after the first level."""
        return num_tokens * max(1, num_steps) <= self._geometry.page_size

    def plan(self, batch: ForwardBatch, *, replan_equivalent: bool = False) -> None:
        """Plan all steps of the round that begins with this batch, and mark the batch.

        Raises:
            StalePlanError: the batch has a plan. A new plan in the middle of a round would lose the
                paths.
            InternalError: the rows have different numbers of branches, or the tokens do not fit on
                the null page.
        """
        branches = num_branches_of(batch, replan_equivalent=replan_equivalent)
        count = batch.num_tokens
        num_steps = self._geometry.page_size // count
        if not num_steps:
            raise InternalError(
                f"a page of {self._geometry.page_size} tokens has no room for a round of {count}"
            )
        contexts = np.array(batch.context_lens, np.int32)
        steps = np.arange(num_steps, dtype=np.int32)[:, None]
        offsets = np.arange(num_steps * count).reshape(num_steps, count)
        tiles = np.array(
            [(row, row * branches, branches) for row in range(batch.num_rows)], np.int32
        )
        rows = RowsInPlace(
            tables=batch.page_tables.int().contiguous(),
            tiles=torch.from_numpy(tiles),
            positions=torch.empty(0, dtype=torch.int32),
            num_in_order=torch.from_numpy(contexts),
            paths=torch.from_numpy(offsets.T.copy()),
            longest_tile=branches,
        )
        reads = RoundReads(
            rows,
            torch.from_numpy(steps + contexts.repeat(branches)),
            torch.from_numpy(np.full(offsets.shape, NULL_INDEX)),
            torch.from_numpy(offsets),
        )
        batch.mark_forward_metadata_ready(
            self, plan=PagedRoundPlan(batch.num_rows, branches, reads)
        )
        self.num_plans += 1

    def reads_of(self, batch: ForwardBatch) -> RoundReads:
        """Return the inputs of the round that begins with this planned batch.

        Raises:
            StalePlanError: another attention planned the batch.
        """
        return self._checked_plan(batch).reads

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
        plan = self._checked_plan(batch)
        step = plan.num_done.get(layer_id, 0)
        if step == len(plan.reads.positions):
            raise InternalError(f"{step} steps of {batch.num_tokens} tokens fill the null page")
        plan.num_done[layer_id] = step + 1
        reads = plan.reads
        pool = self._pools[layer_id]
        write_tokens(
            dense_tokens(k),
            dense_tokens(v),
            pool,
            reads.pages[step],
            reads.offsets[step],
            self._team,
        )
        return attend(
            pool,
            q,
            replace(reads.rows, positions=reads.positions[step]),
            self._geometry.scale,
            self._team,
            sinks,
        )

    def reorder(self, batch: ForwardBatch, parents: Tensor) -> None:
        """Continue the branches at `parents` [R, K] of the last step in the next one."""
        plan = self._checked_plan(batch)
        paths = plan.reads.rows.paths.view(plan.num_rows, plan.num_branches, -1)
        done = paths[:, :, : max(plan.num_done.values())]
        done.copy_(done.gather(1, parents[:, :, None].expand_as(done)))

    def _checked_plan(self, batch: ForwardBatch) -> PagedRoundPlan:
        plan = batch.forward_metadata_plan
        if batch.forward_metadata_planner is not self or not isinstance(plan, PagedRoundPlan):
            raise StalePlanError("the batch was not planned by this multi-step attention")
        if (batch.num_rows, batch.num_tokens) != (plan.num_rows, plan.num_rows * plan.num_branches):
            raise StalePlanError(
                f"planned for {plan.num_rows} rows of {plan.num_branches} branches, the batch has "
                f"{batch.num_rows} rows and {batch.num_tokens} tokens"
            )
        return plan
