"""Multi-step attention for drafts with latent attention, planned once per round.

As in `multistep.py`, committed entries are read in place, the entries of the branches are stored
separately, and nothing is written to the pool. The draft may or may not choose keys. Key positions
count the row's committed slots first, then the steps of the branch's path. A step that gets the
choice of an earlier one also sees the steps that its branch took after that choice.

Legend: R rows, K branches per row, T = R * K tokens, L longest committed row (whole pages), s steps
done.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.backends.selection import best_positions, true_positions
from engine.contracts.latent import LatentGeometry
from engine.core.batch import ForwardBatch
from engine.speculative.attention.multistep import committed_pages, num_branches_of
from runtime.errors import InternalError, StalePlanError


@dataclass
class _Path:
    """The steps of one layer in a round.

    `entries` is [T, s, D]. `index_keys` is [T, n, dim], for the steps up to its latest own choice.
    `num_chosen_from` is the number of steps that it knew then.
    """

    entries: Tensor | None = None
    index_keys: Tensor | None = None
    num_chosen_from: int = 0


@dataclass(frozen=True)
class LatentRoundPlan:
    """The plan of one round.

        slots          [R, L] int64, the places of committed entries
        num_committed  [T, 1] int64
        hidden         [T, L] bool, True after the committed slots

    `paths` is filled by layer during the round. Everything else is constant.
    """

    num_branches: int
    slots: Tensor
    num_committed: Tensor
    hidden: Tensor
    paths: dict[int, _Path] = field(default_factory=dict)


class MultiStepLatentAttention:
    """A `LatentAttentionBackend` for multi-step batches of a draft.

    A row has K consecutive tokens, one per branch. Results may differ in bits from those of the
    paged backend, because a draft promises no bits.
    """

    def __init__(
        self,
        *,
        latent_pools: Mapping[int, Tensor],
        index_pools: Mapping[int, Tensor],
        geometry: LatentGeometry,
    ) -> None:
        self._latent_pools = {
            layer_id: pool.view(-1, pool.shape[-1]) for layer_id, pool in latent_pools.items()
        }
        self._index_pools = {
            layer_id: pool.view(-1, pool.shape[-1]) for layer_id, pool in index_pools.items()
        }
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
        size = self._geometry.page_size
        pages = committed_pages(batch, size)
        slots = (pages[:, :, None] * size + torch.arange(size)).flatten(1)
        committed = torch.tensor(batch.context_lens).repeat_interleave(branches)[:, None]
        hidden = torch.arange(slots.shape[1]) >= committed
        device = next(iter(self._latent_pools.values())).device
        plan = LatentRoundPlan(branches, slots.to(device), committed.to(device), hidden.to(device))
        batch.mark_forward_metadata_ready(self, plan=plan)
        self.num_plans += 1

    def select(
        self, layer_id: int, q: Tensor, k: Tensor, weights: Tensor, batch: ForwardBatch
    ) -> Tensor:
        """Implement `LatentAttentionBackend.select`."""
        plan = self._checked_plan(batch)
        path = plan.paths.setdefault(layer_id, _Path())
        path.index_keys = _longer(path.index_keys, k)
        steps = path.num_chosen_from = path.index_keys.shape[1]
        q, scale = q.float(), q.shape[-1] ** -0.5
        committed = self._index_pools[layer_id][plan.slots].float()  # [R, L, dim]
        by_row = q.view(len(committed), -1, q.shape[-1])  # [R, K * heads, dim]
        products = (by_row @ committed.transpose(1, 2)).view(*q.shape[:2], -1)
        products = torch.cat([products, q @ path.index_keys.float().transpose(1, 2)], -1)
        scores = (torch.relu(products * scale) * weights[..., None]).sum(1)
        hidden = torch.cat([plan.hidden, plan.hidden.new_zeros(len(q), steps)], 1)
        width = min(self._geometry.max_selected, hidden.shape[1])
        found = best_positions(scores.masked_fill(hidden, float("-inf")), hidden, width).long()
        return _numbered(found, plan, steps)

    def run(
        self,
        layer_id: int,
        q: Tensor,
        entries: Tensor,
        selected: Tensor | None,
        batch: ForwardBatch,
    ) -> Tensor:
        """Add `entries` to the branches' paths and attend.

        Shapes are those of `LatentAttentionBackend.run`.

        Raises:
            InternalError: the layer needs a choice of keys.
        """
        plan = self._checked_plan(batch)
        path = plan.paths.setdefault(layer_id, _Path())
        path.entries = _longer(path.entries, entries)
        if selected is None and self._geometry.max_selected:
            raise InternalError(
                f"layer {layer_id} needs the keys selected for {batch.num_tokens} tokens"
            )
        seen = _with_newer_steps(
            _all_committed(plan) if selected is None else selected.long(), plan, path
        )
        keys = self._keys(layer_id, plan, path.entries, seen)
        scores = (q @ keys.transpose(1, 2)).float() * self._geometry.scale
        scores = scores.masked_fill(seen[:, None] < 0, float("-inf"))
        return scores.softmax(-1).to(q.dtype) @ keys[..., : self._geometry.latent_dim]

    def reorder(self, batch: ForwardBatch, parents: Tensor) -> None:
        """Continue the branches at `parents` [R, K] of the last step in the next one."""
        plan = self._checked_plan(batch)
        firsts = torch.arange(len(parents), device=parents.device)[:, None] * plan.num_branches
        places = (firsts + parents).flatten()
        for path in plan.paths.values():
            path.entries = None if path.entries is None else path.entries[places]
            path.index_keys = None if path.index_keys is None else path.index_keys[places]

    def _keys(self, layer_id: int, plan: LatentRoundPlan, steps: Tensor, seen: Tensor) -> Tensor:
        """Return the keys at the seen positions, [T, n, D].

        A place without a key reads the first key, which is always written. The place is masked.
        """
        positions = seen.clamp(min=0)
        tokens = torch.arange(len(seen), device=seen.device)[:, None]
        rows = tokens // plan.num_branches
        committed = self._latent_pools[layer_id][
            plan.slots[rows, positions.clamp(max=plan.slots.shape[1] - 1)]
        ]
        own = steps[tokens, (positions - plan.num_committed).clamp(0, steps.shape[1] - 1)]
        return torch.where((positions >= plan.num_committed)[..., None], own, committed)

    def _checked_plan(self, batch: ForwardBatch) -> LatentRoundPlan:
        plan = batch.forward_metadata_plan
        if batch.forward_metadata_planner is not self or not isinstance(plan, LatentRoundPlan):
            raise StalePlanError("the batch was not planned by this multi-step attention")
        if (batch.num_rows, batch.num_tokens) != (len(plan.slots), len(plan.hidden)):
            raise StalePlanError(
                f"planned for {len(plan.slots)} rows of {plan.num_branches} branches, the batch has "
                f"{batch.num_rows} rows and {batch.num_tokens} tokens"
            )
        return plan


def _longer(path: Tensor | None, step: Tensor) -> Tensor:
    """Append a step [T, dim] to a path."""
    return step[:, None] if path is None else torch.cat([path, step[:, None]], 1)


def _numbered(found: Tensor, plan: LatentRoundPlan, steps: int) -> Tensor:
    """Convert places in [L committed places, s steps] to key positions.

    The steps follow the last committed slot.
    """
    num_places = plan.hidden.shape[1]
    return torch.where(found >= num_places, found - num_places + plan.num_committed, found).int()


def _all_committed(plan: LatentRoundPlan) -> Tensor:
    return true_positions(~plan.hidden, plan.hidden.shape[1]).long()


def _with_newer_steps(selected: Tensor, plan: LatentRoundPlan, path: _Path) -> Tensor:
    """Return the choice of keys and the steps that came after it."""
    assert path.entries is not None
    newer = torch.arange(path.num_chosen_from, path.entries.shape[1], device=selected.device)
    return torch.cat([selected, plan.num_committed + newer], 1)
