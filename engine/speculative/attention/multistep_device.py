"""Attention for the steps in which a draft extends its trees, on a device.

It works as `engine/speculative/attention/multistep.py`, but committed keys are read in their pages.
FlashInfer attends to them and returns the logarithm of each query's sum of exponentials. The path
of a branch is attended to separately, and both results are merged by these sums (Dao et al. 2022,
"FlashAttention", section 3.1). So no shape depends on the length of a row, and a whole round can be
captured.

Legend: R rows, K branches per row, T = R * K, s steps done.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.backends.cuda.wrappers import (
    GraphSizes,
    LseWrapper,
    LseWrapperFactory,
    Slot,
    partial_bytes,
)
from engine.contracts.attention import AttentionGeometry, refuse_sinks
from engine.core.batch import ForwardBatch, GraphBucket
from engine.memory.static import Fence, moved
from engine.speculative.attention.multistep import num_branches_of
from runtime.errors import InternalError, StalePlanError

_IN_FLIGHT = 2  # rounds that may be planned and not yet run


@dataclass(frozen=True)
class DeviceRoundPlan:
    """The plan of one round.

    `paths` is filled during the round, by layer: keys and values of the branches' own steps, [R, K,
    kv, s, D].
    """

    num_rows: int
    num_branches: int
    slot: Slot[LseWrapper]
    epoch: int
    bucket: GraphBucket | None
    paths: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


class DeviceRounds:
    """An `AttentionBackend` for multi-step batches of a draft.

    A row has K consecutive tokens, one per branch.
    """

    def __init__(
        self,
        *,
        kv_pools: Mapping[int, Tensor],
        geometry: AttentionGeometry,
        wrappers: LseWrapperFactory,
        device: torch.device,
    ) -> None:
        self._pools = dict(kv_pools)
        self._geometry = geometry
        self._wrappers = wrappers
        self._device = device
        self._dtype = next(iter(kv_pools.values())).dtype
        self._eager = itertools.cycle([self._slot() for _ in range(_IN_FLIGHT)])
        self._captured: dict[GraphBucket, Slot[LseWrapper]] = {}
        self.num_plans = 0

    def reserve(self, buckets: Sequence[GraphBucket]) -> None:
        """Create the wrappers for captured rounds, with up to `max_rows` rows per bucket.

        Each page has one owner, except the page of padding rows.
        """
        num_pages = max(len(pool) for pool in self._pools.values())
        for bucket in buckets:
            self._captured[bucket] = self._slot(
                GraphSizes(
                    bucket.max_rows,
                    num_pages + bucket.max_rows,
                    partial_bytes=partial_bytes(self._geometry, bucket.max_rows, bucket.num_tokens),
                )
            )

    def plan(self, batch: ForwardBatch, *, replan_equivalent: bool = False) -> None:
        """Plan all steps of the round that begins with this batch, and mark the batch.

        Raises:
            StalePlanError: the batch has a plan. A new plan in the middle of a round would lose the
                paths.
            InternalError: the rows have different numbers of branches, a row has no committed slot,
                or the bucket was not reserved.
        """
        branches = num_branches_of(batch, replan_equivalent=replan_equivalent)
        slot = self._schedule(batch, branches)
        plan = DeviceRoundPlan(batch.num_rows, branches, slot, slot.epoch, batch.graph_bucket)
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

        Shapes are those of `AttentionBackend.run`.
        """
        refuse_sinks(sinks)
        plan = self.check_current(batch)
        geometry = self._geometry
        if (batch.num_rows, batch.num_tokens, len(q)) != (
            plan.num_rows,
            plan.num_rows * plan.num_branches,
            len(k),
        ):
            raise StalePlanError(
                f"planned for {plan.num_rows} rows of {plan.num_branches} branches, the batch has "
                f"{batch.num_rows} rows and {batch.num_tokens} tokens, q {len(q)}"
            )
        shape = (plan.num_rows, plan.num_branches, geometry.num_kv_heads, -1, geometry.head_dim)
        committed, sums = plan.slot.wrapper.run_return_lse(q.contiguous(), self._pools[layer_id])
        keys, values = self._extended(plan, layer_id, k.view(shape), v.view(shape))
        own = (
            q.view(shape) * geometry.scale @ keys.transpose(-1, -2)
        ).float()  # [R, K, kv, heads per kv head, s]
        of_committed = sums.view(shape[:-1]) * math.log(2)
        of_own = own.logsumexp(-1)
        total = torch.logaddexp(of_committed, of_own)
        seen = committed.view(shape) * (of_committed - total).exp()[..., None]
        out = seen + (own - total[..., None]).exp().to(q.dtype) @ values
        return out.to(q.dtype).reshape(-1, geometry.num_heads, geometry.head_dim)

    def reorder(self, batch: ForwardBatch, parents: Tensor) -> None:
        """Continue the branches at `parents` [R, K] of the last step in the next one."""
        paths = self.check_current(batch).paths
        index = parents[:, :, None, None, None]
        for layer_id, parts in paths.items():
            keys, values = (part.gather(1, index.expand_as(part)) for part in parts)
            paths[layer_id] = keys, values

    def check_current(self, batch: ForwardBatch) -> DeviceRoundPlan:
        """Return the batch's plan, if its wrapper still holds it.

        Raises:
            StalePlanError: the wrapper holds another plan.
        """
        plan = batch.forward_metadata_plan
        if batch.forward_metadata_planner is not self or not isinstance(plan, DeviceRoundPlan):
            raise StalePlanError("the batch was not planned by this multi-step attention")
        if plan.bucket != batch.graph_bucket or plan.slot.epoch != plan.epoch:
            raise StalePlanError("the wrapper has since been planned for another round or bucket")
        return plan

    def restart(self, batch: ForwardBatch) -> None:
        """Drop the paths of the batch's round, so that its steps run again from the first."""
        self.check_current(batch).paths.clear()

    def _schedule(self, batch: ForwardBatch, branches: int) -> Slot[LseWrapper]:
        """Plan the wrapper of the batch's bucket, or the next wrapper for eager rounds."""
        geometry = self._geometry
        size = self._geometry.page_size
        bucket = batch.graph_bucket
        if min(batch.context_lens) < 1 or (bucket is not None and bucket not in self._captured):
            raise InternalError(
                f"no round of {batch.num_rows} rows after {batch.context_lens} slots in {bucket}"
            )
        slot = next(self._eager) if bucket is None else self._captured[bucket]
        slot.next_epoch()
        lengths = torch.tensor(batch.context_lens, dtype=torch.int32)
        counts = (lengths + size - 1) // size
        tables = batch.page_tables.cpu()
        pages = torch.cat([tables[row, :count] for row, count in enumerate(counts.tolist())])
        starts = torch.arange(batch.num_rows + 1, dtype=torch.int32) * branches
        first_pages = torch.cat(
            [torch.zeros(1, dtype=torch.int32), counts.cumsum(0, dtype=torch.int32)]
        )
        slot.wrapper.plan(
            starts,
            first_pages,
            moved(pages, self._device),
            (lengths - 1) % size + 1,
            geometry.num_heads,
            geometry.num_kv_heads,
            geometry.head_dim,
            size,
            custom_mask=None,
            causal=False,
            sm_scale=geometry.scale,
            window_left=-1,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            disable_split_kv=False,
        )
        slot.planned.set()
        return slot

    def _slot(self, graph: GraphSizes | None = None) -> Slot[LseWrapper]:
        return Slot(self._wrappers.with_lse(graph), Fence(self._device))

    @staticmethod
    def _extended(
        plan: DeviceRoundPlan, layer_id: int, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        earlier = plan.paths.get(layer_id)
        plan.paths[layer_id] = (
            (k, v)
            if earlier is None
            else (torch.cat([earlier[0], k], 3), torch.cat([earlier[1], v], 3))
        )
        return plan.paths[layer_id]
