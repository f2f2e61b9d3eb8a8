"""Attention of draft trees under verification, with the bits of plain decoding.

The order in which keys lie decides the order of sums, so a node must see its keys laid out as plain decoding would have
stored them: the committed prefix, its ancestors by depth, itself. Each node therefore becomes one row of an ordinary
decode batch over scratch pages: copies of the row's pages, of which the last, partly filled one is copied per node
and completed with the node's ancestors. The backend that decodes then verifies, without knowing it.

Chains need none of this: stored in order, they are causal runs of tokens, which any paged backend has.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.backends.commit import commit_kv
from engine.backends.plan import storage_positions
from engine.backends.visibility import trees_of
from engine.contracts.attention import AttentionBackend
from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.draft_trees import SpecInfo
from runtime.errors import InternalError, StalePlanError

BackendOver = Callable[[Mapping[int, Tensor]], AttentionBackend]


@dataclass(frozen=True)
class TreePlan:
    """What `run` needs of a batch of trees. T nodes in all; scratch pages are numbered from 1.

    own_pages, own_offsets    [T] int64, where a node's key is stored
    copied_pages              [S] int64, pages copied to the scratch pages 1..S
    from_pages, from_offsets  [M] int64, where ancestors are stored
    to_pages, to_offsets      [M] int64, where in the scratch pages they belong
    nodes                     a decode batch of one row per node over the scratch pages
    """

    num_rows: int
    own_pages: Tensor
    own_offsets: Tensor
    copied_pages: Tensor
    from_pages: Tensor
    from_offsets: Tensor
    to_pages: Tensor
    to_offsets: Tensor
    num_scratch_pages: int
    nodes: ForwardBatch


@dataclass
class _Layout:
    """Scratch pages being handed out to the nodes of a batch."""

    page_size: int
    copied: list[int] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)
    fresh: list[tuple[int, int]] = field(default_factory=list)  # (node, place in its table) of pages not copied
    moves: list[tuple[int, int, int, int, int]] = field(default_factory=list)  # from page, offset; node, page, offset

    def add_row(self, pages: list[int], context_len: int, parents: tuple[int, ...], depths: tuple[int, ...]) -> None:
        size = self.page_size
        num_full, filled = divmod(context_len, size)
        shared = [self._copy(page) for page in pages[:num_full]]
        for node, depth in enumerate(depths):
            number = len(self.tables)
            table = [*shared, self._copy(pages[num_full])] if filled else list(shared)
            for place in range(len(table), num_full + -(-(filled + depth + 1) // size)):
                self.fresh.append((number, place))
                table.append(0)
            ancestor, at = parents[node], filled + depth - 1
            while ancestor >= 0:
                page, offset = divmod(context_len + ancestor, size)
                self.moves.append((pages[page], offset, number, num_full + at // size, at % size))
                ancestor, at = parents[ancestor], at - 1
            self.tables.append(table)

    def _copy(self, page: int) -> int:
        self.copied.append(page)
        return len(self.copied)

    def finish(self) -> int:
        """Give the pages that are not copied their numbers; returns how many scratch pages there are."""
        for number, (node, place) in enumerate(self.fresh, start=len(self.copied) + 1):
            self.tables[node][place] = number
        return len(self.copied) + len(self.fresh) + 1


class TreeAttention:
    """An `AttentionBackend` that adds trees to a paged one. It also commits what a verification accepted."""

    def __init__(self, *, paged: AttentionBackend, kv_pools: Mapping[int, Tensor], page_size: int,
                 backend_over: BackendOver) -> None:
        """`paged` runs everything but trees over `kv_pools`; `backend_over` builds one of its kind over other pools of
        the same page shape."""
        self._paged = paged
        self._pools = dict(kv_pools)
        self._page_size = page_size
        self._backend_over = backend_over
        self._scratch: Tensor | None = None
        self._nodes = paged
        self.num_plans = 0

    def plan(self, batch: ForwardBatch, *, replan_equivalent: bool = False) -> None:
        """Plan and mark the batch; trees once for all their nodes."""
        info = trees_of(batch)
        if info is None or not self._pools:
            self._paged.plan(batch, replan_equivalent=replan_equivalent)
            return
        plan = _build_plan(batch, info, self._page_size)
        self._reserve(plan.num_scratch_pages)
        self._nodes.plan(plan.nodes)
        batch.mark_forward_metadata_ready(self, plan=plan, replan_equivalent=replan_equivalent)
        self.num_plans += 1

    def run(self, layer_id: int, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch) -> Tensor:
        """See `AttentionBackend.run`."""
        plan = batch.forward_metadata_plan
        if batch.forward_metadata_planner is not self:
            return self._paged.run(layer_id, q, k, v, batch)
        if not isinstance(plan, TreePlan) or plan.num_rows != batch.num_rows or not (
                plan.nodes.num_rows == batch.num_tokens == len(q)):
            raise StalePlanError("the trees of this batch are not those that were planned")
        pool, scratch = self._pool(layer_id), self._scratch
        assert scratch is not None, "planning reserved the scratch pages"
        pool[plan.own_pages, 0, :, plan.own_offsets] = k
        pool[plan.own_pages, 1, :, plan.own_offsets] = v
        torch.index_select(pool, 0, plan.copied_pages, out=scratch[1:len(plan.copied_pages) + 1])
        scratch[plan.to_pages, :, :, plan.to_offsets] = pool[plan.from_pages, :, :, plan.from_offsets]
        return self._nodes.run(layer_id, q, k, v, plan.nodes)

    def commit(self, batch: ForwardBatch) -> None:
        """Move the keys and values of accepted nodes to where plain decoding would have stored them."""
        commit_kv(self._pools, batch, self._page_size)

    def _pool(self, layer_id: int) -> Tensor:
        pool = self._pools.get(layer_id)
        if pool is None:
            raise InternalError(f"layer {layer_id} has no KV pages on this stage")
        return pool

    def _reserve(self, num_pages: int) -> None:
        """Scratch pages are shared by all layers, because a layer needs them only while it runs."""
        if self._scratch is not None and self._scratch.shape[0] >= num_pages:
            return
        sample = next(iter(self._pools.values()))
        self._scratch = sample.new_zeros(2 * num_pages, *sample.shape[1:])
        self._nodes = self._backend_over(dict.fromkeys(self._pools, self._scratch))


def _build_plan(batch: ForwardBatch, info: SpecInfo, page_size: int) -> TreePlan:
    rows, stored_at = storage_positions(batch)
    layout = _Layout(page_size)
    for row, spec in enumerate(info.rows):
        if len(spec.parents) != batch.query_lens[row]:
            raise InternalError(f"row {row} brings {batch.query_lens[row]} nodes, its tree has {len(spec.parents)}")
        layout.add_row(batch.page_tables[row].tolist(), batch.context_lens[row], spec.parents, info.depths[row])
    num_scratch_pages = layout.finish()
    moves = [(page, offset, layout.tables[node][place], at) for page, offset, node, place, at in layout.moves]
    from_pages, from_offsets, to_pages, to_offsets = torch.tensor(moves, dtype=torch.long).view(-1, 4).t()
    return TreePlan(
        num_rows=batch.num_rows,
        own_pages=batch.page_tables.long()[rows, stored_at // page_size], own_offsets=stored_at % page_size,
        copied_pages=torch.tensor(layout.copied, dtype=torch.long),
        from_pages=from_pages, from_offsets=from_offsets, to_pages=to_pages, to_offsets=to_offsets,
        num_scratch_pages=num_scratch_pages, nodes=_node_batch(batch, info, layout.tables))


def _node_batch(batch: ForwardBatch, info: SpecInfo, tables: list[list[int]]) -> ForwardBatch:
    """A decode batch of one row per node."""
    lengths = tuple(context_len + depth for context_len, depths in zip(batch.context_lens, info.depths, strict=True)
                    for depth in depths)
    width = max(len(table) for table in tables)
    return ForwardBatch(
        mode=ForwardMode.DECODE, request_keys=tuple(range(len(tables))), query_lens=(1,) * len(tables),
        context_lens=lengths, token_ids=None, positions=torch.tensor(lengths),
        page_tables=torch.tensor([[*table, *[0] * (width - len(table))] for table in tables], dtype=torch.int32),
        slot_ids=torch.zeros(len(tables), dtype=torch.int32), sampling=(None,) * len(tables))
