"""Paged attention by FlashInfer, one wrapper plan per batch, held to the batch by its marker.

A wrapper keeps the schedule of its last `plan`; a second plan silently replaces it, and running the first batch then
reads the wrong keys. So every wrapper counts its plans, a batch's plan remembers the count, and `run` compares. Each
kind of wrapper exists twice, because the next batch is planned while the one before still runs.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from engine.attention.backend import AttentionGeometry
from engine.attention.mask import tree_visibility
from engine.attention.plan import checked_width, storage_positions
from engine.attention.wrappers import DecodeWrapper, RaggedWrapper, WrapperFactory
from engine.batch import ForwardBatch, ForwardMode
from runtime.errors import InternalError, StalePlanError

WriteKv = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
_IN_FLIGHT = 2  # batches that may be planned and not yet run


_Wrapper = TypeVar("_Wrapper", DecodeWrapper, RaggedWrapper)


@dataclass
class _Slot(Generic[_Wrapper]):
    """A wrapper and how often it was planned."""

    wrapper: _Wrapper
    epoch: int = 0


_AnySlot = _Slot[DecodeWrapper] | _Slot[RaggedWrapper]


@dataclass(frozen=True)
class FlashInferPlan:
    """What `run` needs besides q, k and v. `slot` is None where the batch has no tokens.

    write_pages, write_offsets  [T] int64 on the device
    """

    num_rows: int
    num_tokens: int
    write_pages: Tensor
    write_offsets: Tensor
    slot: _AnySlot | None
    epoch: int


@dataclass(frozen=True)
class _Keys:
    """Where the rows that bring tokens have their keys, in FlashInfer's form; indices on the device, the rest int32 on
    the CPU."""

    rows: tuple[int, ...]
    qo_indptr: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor


class FlashInferAttention:
    """An `AttentionBackend` over KV tensors [num_pages, 2 (k, v), num_kv_heads, page_size, head_dim], one per layer.

    Trees are verified through the custom mask, whether the batch brings a `TreeMask` or its trees.
    """

    def __init__(self, *, kv_pools: Mapping[int, Tensor], geometry: AttentionGeometry, wrappers: WrapperFactory,
                 device: torch.device, write_kv: WriteKv) -> None:
        """`write_kv(pool, k, v, pages, offsets)` puts k, v [T, kv heads, D] at pool[pages[t], :, :, offsets[t]]."""
        if geometry.num_heads % geometry.num_kv_heads:
            raise InternalError(f"{geometry.num_heads} heads cannot share {geometry.num_kv_heads} kv heads evenly")
        self._pools = dict(kv_pools)
        self._geometry = geometry
        self._device = device
        self._write_kv = write_kv
        self._dtype = next(iter(kv_pools.values())).dtype if kv_pools else torch.bfloat16
        share = geometry.num_heads // geometry.num_kv_heads
        self._decode = itertools.cycle([_Slot(wrappers.decode(group_size=share)) for _ in range(_IN_FLIGHT)])
        self._causal = itertools.cycle([_Slot(wrappers.ragged()) for _ in range(_IN_FLIGHT)])
        self._masked = itertools.cycle([_Slot(wrappers.ragged()) for _ in range(_IN_FLIGHT)])
        self.num_plans = 0

    def plan(self, batch: ForwardBatch, *, replan_equivalent: bool = False) -> None:
        """Give the batch a wrapper's schedule and mark it.

        Raises:
            InternalError: a tree mask that does not fit its row.
        """
        rows, positions = storage_positions(batch)
        pages = batch.page_tables.cpu().long()
        slot = self._schedule(batch) if len(positions) else None
        plan = FlashInferPlan(
            num_rows=batch.num_rows,
            num_tokens=len(positions),
            write_pages=pages[rows, positions // self._geometry.page_size].to(self._device),
            write_offsets=(positions % self._geometry.page_size).to(self._device),
            slot=slot,
            epoch=0 if slot is None else slot.epoch,
        )
        batch.mark_forward_metadata_ready(self, plan=plan, replan_equivalent=replan_equivalent)
        self.num_plans += 1

    def run(self, layer_id: int, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch) -> Tensor:
        """Write k, v of the new tokens to their pages, then attend. Shapes as in `AttentionBackend.run`.

        Raises:
            StalePlanError: the batch was not planned by this backend, its rows or tokens are not the planned ones, or
                the wrapper has been planned for another batch since.
            InternalError: this stage has no KV tensor for the layer.
        """
        plan = self._checked_plan(batch, q, k, v)
        pool = self._pools.get(layer_id)
        if pool is None:
            raise InternalError(f"layer {layer_id} has no KV pages on this stage")
        if plan.slot is None:
            return torch.empty_like(q)
        self._write_kv(pool, k, v, plan.write_pages, plan.write_offsets)
        return plan.slot.wrapper.run(q, pool)

    def _schedule(self, batch: ForwardBatch) -> _AnySlot:
        """Plan the next wrapper of the batch's kind."""
        geometry, keys = self._geometry, _keys_of(batch, self._geometry.page_size, self._device)
        heads = (geometry.num_heads, geometry.num_kv_heads, geometry.head_dim, geometry.page_size)
        visible = _visible(batch)
        if batch.mode is ForwardMode.DECODE and all(length == 1 for length in batch.query_lens):
            decode = next(self._decode)
            decode.epoch += 1
            decode.wrapper.plan(keys.indptr, keys.indices, keys.last_page_len, *heads, sm_scale=geometry.scale,
                                q_data_type=self._dtype, kv_data_type=self._dtype)
            return decode
        slot = next(self._masked if visible else self._causal)
        slot.epoch += 1
        mask = _flat_mask(visible, keys.rows, batch).to(self._device) if visible else None
        slot.wrapper.plan(keys.qo_indptr, keys.indptr, keys.indices, keys.last_page_len, *heads, custom_mask=mask,
                          causal=mask is None, sm_scale=geometry.scale, q_data_type=self._dtype,
                          kv_data_type=self._dtype)
        return slot

    def _checked_plan(self, batch: ForwardBatch, q: Tensor, k: Tensor, v: Tensor) -> FlashInferPlan:
        plan = batch.forward_metadata_plan
        if batch.forward_metadata_planner is not self or not isinstance(plan, FlashInferPlan):
            raise StalePlanError("the batch was not planned by this attention backend")
        if (batch.num_rows, batch.num_tokens) != (plan.num_rows, plan.num_tokens):
            raise StalePlanError(f"planned for {plan.num_rows} rows and {plan.num_tokens} tokens, the batch has "
                                 f"{batch.num_rows} and {batch.num_tokens}")
        geometry = self._geometry
        kv_shape = (plan.num_tokens, geometry.num_kv_heads, geometry.head_dim)
        if q.shape != (plan.num_tokens, geometry.num_heads, geometry.head_dim) or not k.shape == v.shape == kv_shape:
            raise StalePlanError(f"planned for {plan.num_tokens} tokens of {geometry}, got q {tuple(q.shape)}, "
                                 f"k {tuple(k.shape)}, v {tuple(v.shape)}")
        if plan.slot is not None and plan.slot.epoch != plan.epoch:
            raise StalePlanError("the wrapper was planned for another batch since")
        return plan


def _keys_of(batch: ForwardBatch, page_size: int, device: torch.device) -> _Keys:
    rows = tuple(row for row, length in enumerate(batch.query_lens) if length)
    lengths = torch.tensor([batch.context_lens[row] + batch.query_lens[row] for row in rows], dtype=torch.int32)
    num_pages = (lengths + page_size - 1) // page_size
    tables = batch.page_tables.cpu()
    return _Keys(
        rows=rows,
        qo_indptr=_offsets(torch.tensor([batch.query_lens[row] for row in rows], dtype=torch.int32)),
        indptr=_offsets(num_pages),
        indices=torch.cat([tables[row, :num] for row, num in zip(rows, num_pages.tolist(), strict=True)]).to(device),
        last_page_len=(lengths - 1) % page_size + 1,
    )


def _offsets(lengths: Tensor) -> Tensor:
    """[R + 1] int32: where each row starts, and the end."""
    return torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)])


def _visible(batch: ForwardBatch) -> tuple[Tensor, ...]:
    """Per row who sees which of its last keys; nothing where plain causal order is the answer."""
    visible = tree_visibility(batch)
    for row, mask in enumerate(visible):
        if batch.query_lens[row]:
            checked_width(mask, row, batch.query_lens[row], batch.context_lens[row])
    return visible


def _flat_mask(visible: tuple[Tensor, ...], rows: tuple[int, ...], batch: ForwardBatch) -> Tensor:
    """[sum of queries * keys] bool: keys before those a row's mask speaks about are committed and seen by all."""
    masks = []
    for row in rows:
        num_before = batch.context_lens[row] + batch.query_lens[row] - visible[row].shape[1]
        masks.append(torch.nn.functional.pad(visible[row], (num_before, 0), value=True).flatten())
    return torch.cat(masks)
