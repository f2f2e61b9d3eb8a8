"""Paged attention by FlashInfer, with one wrapper plan per batch.

A wrapper keeps the schedule of its last `plan`. A second plan replaces it silently, and the first
batch would then read the wrong keys. Every wrapper therefore counts its plans, a batch's plan keeps
the count, and `run` compares the two. Each kind of wrapper exists twice, because the next batch is
planned while the previous one still runs.

Captured forwards have one wrapper per bucket. A replay uses the content of its buffers without a
check, so `check_current` checks them before.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from engine.backends.commit import commit_kv
from engine.backends.cuda.wrappers import (
    DecodeWrapper,
    GraphSizes,
    RaggedWrapper,
    Slot,
    WrapperFactory,
    partial_bytes,
)
from engine.backends.plan import check_covered, storage_positions, tree_visibility, visible_in_trees
from engine.contracts.attention import AttentionGeometry, refuse_sinks
from engine.core.batch import ForwardBatch, ForwardMode, GraphBucket
from engine.core.draft_trees import SpecInfo
from engine.core.numerics import Numerics
from engine.memory.static import Fence, StaticInts, moved
from runtime.errors import InternalError, StalePlanError

WriteKv = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
_IN_FLIGHT = 2  # batches that may be planned and not yet run


_WrapperT = TypeVar("_WrapperT", DecodeWrapper, RaggedWrapper)


_AnySlot = Slot[DecodeWrapper] | Slot[RaggedWrapper]


@dataclass(frozen=True)
class FlashInferPlan:
    """The inputs of `run` besides q, k and v.

    Attributes:
        write_pages, write_offsets: [T] int64 on the device.
        slot: the planned wrapper; None if the batch has no tokens.
    """

    num_rows: int
    num_tokens: int
    write_pages: Tensor
    write_offsets: Tensor
    slot: _AnySlot | None
    epoch: int
    bucket: GraphBucket | None


@dataclass(frozen=True)
class _Keys:
    """The keys of the rows with tokens, in FlashInfer's format.

    A padded batch includes all rows. `indices` is on the device; the other tensors are int32 on the
    CPU.
    """

    rows: tuple[int, ...]
    qo_indptr: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor


class FlashInferAttention:
    """An `AttentionBackend` over KV tensors, one per layer.

    The tensors are [num_pages, 2 (k, v), num_kv_heads, page_size, head_dim]. Trees are verified
    through the custom mask; `commit` moves the accepted nodes.
    """

    def __init__(
        self,
        *,
        kv_pools: Mapping[int, Tensor],
        geometry: AttentionGeometry,
        wrappers: WrapperFactory,
        device: torch.device,
        write_kv: WriteKv,
        numerics: Numerics = Numerics.FAST,
    ) -> None:
        """Create a backend.

        `write_kv(pool, k, v, pages, offsets)` stores k and v [T, kv heads, D] at pool[pages[t], :,
        :, offsets[t]]. In exact numerics the keys of a row are not split between workers, so that
        its sums do not depend on the batch. A single long row then takes longer.
        """
        if geometry.num_heads % geometry.num_kv_heads:
            raise InternalError(
                f"{geometry.num_heads} heads cannot share {geometry.num_kv_heads} kv heads evenly"
            )
        self._pools = dict(kv_pools)
        self._geometry = geometry
        self._device = device
        self._write_kv = write_kv
        self._dtype = next(iter(kv_pools.values())).dtype if kv_pools else torch.bfloat16
        self._exact = numerics is Numerics.EXACT
        self._wrappers = wrappers
        self._share = geometry.num_heads // geometry.num_kv_heads
        self._decode = itertools.cycle(
            [self._slot(wrappers.decode(group_size=self._share)) for _ in range(_IN_FLIGHT)]
        )
        self._causal = itertools.cycle([self._slot(wrappers.ragged()) for _ in range(_IN_FLIGHT)])
        self._masked = itertools.cycle([self._slot(wrappers.ragged()) for _ in range(_IN_FLIGHT)])
        self._graph_decode: dict[GraphBucket, Slot[DecodeWrapper]] = {}
        self._graph_ragged: dict[GraphBucket, Slot[RaggedWrapper]] = {}
        self._graph_writes: StaticInts | None = None
        self.num_plans = 0

    def reserve(self, buckets: Sequence[GraphBucket]) -> None:
        """Create the wrappers of captured forwards.

        A batch that is padded to one of these buckets is planned on the bucket's wrapper.

        Raises:
            InternalError: numerics are exact. A captured kernel of FlashInfer has a fixed number of
                blocks, and only plans that may split keys tell the surplus ones to do nothing.
        """
        if self._exact:
            raise InternalError("forwards in exact numerics cannot be captured over FlashInfer")
        longest = max(bucket.num_tokens for bucket in buckets)
        self._graph_writes = StaticInts({"pages": longest, "offsets": longest}, self._device)
        for bucket in buckets:
            sizes = self._graph_sizes(bucket)
            if bucket.mode is ForwardMode.DECODE:
                wrapper = self._wrappers.decode(group_size=self._share, graph=sizes)
                self._graph_decode[bucket] = self._slot(wrapper)
            else:
                self._graph_ragged[bucket] = self._slot(self._wrappers.ragged(sizes))

    def plan(self, batch: ForwardBatch, *, replan_equivalent: bool = False) -> None:
        """Plan a wrapper for the batch and mark the batch.

        Raises:
            InternalError: a tree has another size than its row, or no wrapper was reserved for the
                bucket.
        """
        rows, positions = storage_positions(batch)
        page_size = self._geometry.page_size
        pages = batch.page_tables.cpu().long()[rows, positions // page_size]
        offsets = positions % page_size
        slot = self._schedule(batch) if len(positions) and self._pools else None
        if batch.graph_bucket is None:
            pages = moved(pages, self._device)
            offsets = moved(offsets, self._device)
        else:
            pages, offsets = self._refill_writes(pages, offsets)
        plan = FlashInferPlan(
            num_rows=batch.num_rows,
            num_tokens=len(positions),
            write_pages=pages,
            write_offsets=offsets,
            slot=slot,
            epoch=0 if slot is None else slot.epoch,
            bucket=batch.graph_bucket,
        )
        batch.mark_forward_metadata_ready(self, plan=plan, replan_equivalent=replan_equivalent)
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
        """Write k and v of the new tokens to their pages, then attend.

        Shapes are those of `AttentionBackend.run`.

        Raises:
            StalePlanError: the batch was not planned by this backend, its rows or tokens differ
                from the plan's, or the wrapper was planned for another batch since.
            InternalError: this stage has no KV tensor for the layer, or there are sinks.
        """
        refuse_sinks(sinks)
        plan = self._checked_plan(batch, q, k, v)
        pool = self._pools.get(layer_id)
        if pool is None:
            raise InternalError(f"layer {layer_id} has no KV pages on this stage")
        if plan.slot is None:
            return torch.empty_like(q)
        self._write_kv(pool, k, v, plan.write_pages, plan.write_offsets)
        return plan.slot.wrapper.run(q.contiguous(), pool)  # q may be a slice of a fused product

    def commit(self, batch: ForwardBatch) -> None:
        """Move the keys and values of accepted nodes to the positions of plain decoding."""
        commit_kv(self._pools, batch, self._geometry.page_size)

    def check_current(self, batch: ForwardBatch) -> FlashInferPlan:
        """Return the batch's plan if a replay of its bucket would use it.

        Raises:
            StalePlanError: as in `run`.
        """
        plan = batch.forward_metadata_plan
        if batch.forward_metadata_planner is not self or not isinstance(plan, FlashInferPlan):
            raise StalePlanError("the batch was not planned by this attention backend")
        if plan.bucket != batch.graph_bucket:
            raise StalePlanError(
                f"planned for {plan.bucket or 'an eager forward'}, the batch is padded to "
                f"{batch.graph_bucket or 'nothing'}"
            )
        if plan.slot is not None and plan.slot.epoch != plan.epoch:
            raise StalePlanError("the wrapper was planned for another batch since")
        return plan

    def _checked_plan(self, batch: ForwardBatch, q: Tensor, k: Tensor, v: Tensor) -> FlashInferPlan:
        plan = self.check_current(batch)
        check_covered(batch, (plan.num_rows, plan.num_tokens), self._geometry, q, k, v)
        return plan

    def _schedule(self, batch: ForwardBatch) -> _AnySlot:
        """Plan the batch's wrapper: that of its bucket, or the next of its kind."""
        geometry = self._geometry
        keys = _keys_of(batch, self._geometry.page_size, self._device)
        heads = (geometry.num_heads, geometry.num_kv_heads, geometry.head_dim, geometry.page_size)
        window = -1 if geometry.window is None else geometry.window
        visible = _visible(batch)
        if visible and geometry.window is not None:
            raise InternalError("trees cannot be verified by layers that see a window only")
        if batch.mode is ForwardMode.DECODE and all(length == 1 for length in batch.query_lens):
            decode = _reserved(self._graph_decode, batch) or next(self._decode)
            decode.next_epoch()
            decode.wrapper.plan(
                keys.indptr,
                keys.indices,
                keys.last_page_len,
                *heads,
                sm_scale=geometry.scale,
                window_left=window,
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
                disable_split_kv=self._exact,
            )
            decode.planned.set()
            return decode
        slot = _reserved(self._graph_ragged, batch) or next(
            self._masked if visible else self._causal
        )
        slot.next_epoch()
        mask = moved(_flat_mask(visible, keys.rows, batch), self._device) if visible else None
        slot.wrapper.plan(
            keys.qo_indptr,
            keys.indptr,
            keys.indices,
            keys.last_page_len,
            *heads,
            custom_mask=mask,
            causal=mask is None,
            sm_scale=geometry.scale,
            window_left=window,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            disable_split_kv=self._exact,
        )
        slot.planned.set()
        return slot

    def _slot(self, wrapper: _WrapperT) -> Slot[_WrapperT]:
        return Slot(wrapper, Fence(self._device))

    def _graph_sizes(self, bucket: GraphBucket) -> GraphSizes:
        """Return the buffer sizes of a captured wrapper.

        A page has one owner, so real rows have no more pages than the pool. Padded rows have null
        pages, and their part of a mask is at most their own square.
        """
        page_size = self._geometry.page_size
        num_pages = max((len(pool) for pool in self._pools.values()), default=1)
        padding = bucket.num_rows + -(-bucket.num_tokens // page_size)
        bits = bucket.row_tokens * num_pages * page_size + bucket.num_tokens**2
        return GraphSizes(
            bucket.num_rows,
            num_pages + padding,
            mask_bytes=-(-bits // 8) + bucket.num_rows if bucket.is_masked else 0,
            partial_bytes=partial_bytes(self._geometry, bucket.num_rows, bucket.num_tokens),
        )

    def _refill_writes(self, pages: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        writes = self._graph_writes
        assert writes is not None, "reserving a bucket creates the write buffers"
        writes.refill({"pages": pages, "offsets": offsets})
        return writes["pages"][: len(pages)], writes["offsets"][: len(offsets)]


def _reserved(
    slots: Mapping[GraphBucket, Slot[_WrapperT]], batch: ForwardBatch
) -> Slot[_WrapperT] | None:
    """Return the slot of the batch's bucket, or None if the batch has no bucket."""
    bucket = batch.graph_bucket
    if bucket is not None and bucket not in slots:
        raise InternalError(f"no wrapper was reserved for {bucket}")
    return None if bucket is None else slots[bucket]


def _keys_of(batch: ForwardBatch, page_size: int, device: torch.device) -> _Keys:
    rows = tuple(row for row, length in enumerate(batch.query_lens) if length or batch.graph_bucket)
    lengths = torch.tensor(
        [max(1, batch.context_lens[row] + batch.query_lens[row]) for row in rows], dtype=torch.int32
    )
    num_pages = (lengths + page_size - 1) // page_size
    tables = batch.page_tables.cpu()
    indices = torch.cat(
        [tables[row, :num] for row, num in zip(rows, num_pages.tolist(), strict=True)]
    )
    return _Keys(
        rows=rows,
        qo_indptr=_offsets(
            torch.tensor([batch.query_lens[row] for row in rows], dtype=torch.int32)
        ),
        indptr=_offsets(num_pages),
        indices=moved(indices, device),
        last_page_len=(lengths - 1) % page_size + 1,
    )


def _offsets(lengths: Tensor) -> Tensor:
    """Return the starts of the rows and the end, [R + 1] int32."""
    return torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)])


def _visible(batch: ForwardBatch) -> tuple[Tensor, ...]:
    """Return for each row a mask of its last keys; empty if plain causal order applies."""
    bucket = batch.graph_bucket
    info = batch.spec_info
    if bucket is not None and bucket.is_masked and isinstance(info, SpecInfo):
        return visible_in_trees(info, batch.query_lens)  # a captured mask also needs chains
    return tree_visibility(batch)


def _flat_mask(visible: tuple[Tensor, ...], rows: tuple[int, ...], batch: ForwardBatch) -> Tensor:
    """Return the masks of all rows as [sum of queries * keys] bool.

    Keys before the part that a row's mask covers are committed, and all its tokens see them.
    """
    masks = []
    for row in rows:
        num_before = batch.context_lens[row] + batch.query_lens[row] - visible[row].shape[1]
        masks.append(torch.nn.functional.pad(visible[row], (num_before, 0), value=True).flatten())
    return torch.cat(masks)
