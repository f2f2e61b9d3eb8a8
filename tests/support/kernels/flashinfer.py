"""FlashInfer's wrappers by their documentation, computed row by row in fp64.

Like the real ones they keep the schedule of the last plan only and are silent about it; and they
insist on lengths on the host. Those made for graphs keep it in buffers of a fixed size,
and a run reads nothing else: so a run that is started again behaves as a replay does.
"""

import math
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from engine.backends.cuda.wrappers import WORKSPACE_BYTES, GraphSizes

_CTAS = 2 * 132  # two per multiprocessor of an H100


@dataclass(frozen=True)
class _Frozen:
    """What a captured run keeps from the first plan on."""

    page_size: int
    scale: float
    window: int
    causal: bool
    splits: bool
    sees_all: bool = False


def _host(*tensors: Tensor) -> list[list[int]]:
    for tensor in tensors:
        assert (tensor.dtype, tensor.device.type) == (torch.int32, "cpu"), (
            "lengths are int32 on the CPU"
        )
    return [tensor.tolist() for tensor in tensors]


class _Paged:
    """`buffers` of a wrapper without graphs are replaced by every plan, those of one with graphs
    never."""

    def __init__(self, graph: GraphSizes | None) -> None:
        self.graph = graph
        self.frozen: _Frozen | None = None
        self.num_plans = 0
        self.num_rows_planned: int | None = None
        self.buffers: dict[str, Tensor] = {}
        if graph is not None:
            counts = {
                "qo_indptr": graph.num_rows + 1,
                "indptr": graph.num_rows + 1,
                "indices": graph.num_pages,
                "last_page_len": graph.num_rows,
                "mask_indptr": graph.num_rows + 1,
            }
            self.buffers = {
                name: torch.zeros(count, dtype=torch.int32) for name, count in counts.items()
            }
            self.buffers["mask"] = torch.zeros(graph.mask_bytes, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def _store(self, frozen: _Frozen, **values: Tensor) -> None:
        (queries, starts), mask = _host(values["qo_indptr"], values["indptr"]), values["mask"]
        assert (starts[0], starts[-1]) == (0, len(values["indices"]))
        if self.graph is None:
            self.frozen, self.buffers = frozen, values
        else:
            assert len(queries) == self.graph.num_rows + 1, (
                "the rows of a captured wrapper are fixed"
            )
            assert self.frozen in (None, frozen), "a captured run keeps what it was captured with"
            self.num_rows_planned = self.num_rows_planned or queries[-1]
            assert queries[-1] <= self.num_rows_planned, "no more queries than at the first plan"
            assert len(values["indices"]) <= self.graph.num_pages
            assert len(mask) <= self.graph.mask_bytes
            assert bool(self.graph.mask_bytes) is not (frozen.causal or frozen.sees_all), (
                "a mask needs its buffers"
            )
            self.frozen = frozen
            for name, value in values.items():
                self.buffers[name][: len(value)] = value
        self.num_plans += 1

    def run(self, q: Tensor, paged_kv_cache: Tensor) -> Tensor:
        out = torch.full_like(q, float("nan"))
        with _disable_current_modes():  # work of a kernel is not recorded
            self._attend(q, paged_kv_cache, out)
        return out

    def run_return_lse(self, q: Tensor, paged_kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.full_like(q, float("nan"))
        sums = torch.full(q.shape[:2], float("nan"), dtype=torch.float32)
        with _disable_current_modes():
            self._attend(q, paged_kv_cache, out, sums)
        return out, sums

    def _attend(self, q: Tensor, cache: Tensor, out: Tensor, sums: Tensor | None = None) -> None:
        frozen, held = (
            self.frozen,
            {name: value.tolist() for name, value in self.buffers.items() if name != "mask"},
        )
        assert frozen is not None
        assert self.graph is not None or len(q) == held["qo_indptr"][-1]
        share = q.shape[1] // cache.shape[2]
        for row, (first, stop) in enumerate(pairwise(held["qo_indptr"])):
            pages = held["indices"][held["indptr"][row] : held["indptr"][row + 1]]
            length = (len(pages) - 1) * frozen.page_size + held["last_page_len"][row]
            if first < stop:
                entries = cache[pages].double().permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
                keys, values = entries.repeat_interleave(share, 1)
                visible = self._visible(row, stop - first, length)
                # Values that no token attends to are not read.
                scores = (
                    q[first:stop].double().transpose(0, 1) @ keys.transpose(1, 2) * frozen.scale
                ).masked_fill(~visible, float("-inf"))
                weights = scores.softmax(-1)
                if sums is not None:
                    sums[first:stop] = (scores.logsumexp(-1) / math.log(2)).t().float()
                seen = visible.any(0)
                out[first:stop] = (weights[..., seen] @ values[:, seen]).transpose(0, 1).to(q.dtype)

    def _visible(self, row: int, count: int, length: int) -> Tensor:
        frozen = self.frozen
        assert frozen is not None
        if frozen.sees_all:
            visible = torch.ones(count, length, dtype=torch.bool)
        elif frozen.causal:
            visible = torch.ones(count, length, dtype=torch.bool).tril(length - count)
        else:
            start = self.buffers["mask_indptr"][row]
            packed = self.buffers["mask"][start : start + -(-count * length // 8)].numpy()
            bits = np.unpackbits(packed, bitorder="little")[: count * length]
            visible = torch.from_numpy(bits.astype(bool)).view(count, length)
        if frozen.window >= 0:
            visible = visible & torch.ones(count, length, dtype=torch.bool).triu(
                length - count - frozen.window
            )
        return visible


def partial_results(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    num_rows: int,
    num_tokens: int,
    is_captured: bool,
) -> int:
    """Return the bytes that FlashInfer's scheduler for ragged rows reserves if it may split
    keys."""
    share, places = num_heads // num_kv_heads, _CTAS // num_kv_heads
    if not is_captured:
        tile = 128 if head_dim < 256 else 64
    else:
        longest = (num_tokens - num_rows + 1) * share
        tile = 128 if longest > 64 and head_dim < 256 else 64 if longest > 16 else 16
        places = max(places, -(-num_tokens * share // tile) + num_rows - 1)
    return num_heads * places * tile * (head_dim + 1) * 4


class FakeDecode(_Paged):
    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        sm_scale: float,
        window_left: int,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        disable_split_kv: bool,
    ) -> None:
        _host(last_page_len)
        frozen = _Frozen(page_size, sm_scale, window_left, causal=True, splits=not disable_split_kv)
        self._store(
            frozen,
            qo_indptr=torch.arange(len(indptr), dtype=torch.int32),
            indptr=indptr,
            indices=indices,
            last_page_len=last_page_len,
            mask=torch.empty(0, dtype=torch.uint8),
        )


class FakeRagged(_Paged):
    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        custom_mask: Tensor | None,
        causal: bool,
        sm_scale: float,
        window_left: int,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        disable_split_kv: bool,
    ) -> None:
        assert not (causal and custom_mask is not None)
        starts, last = _host(paged_kv_indptr, paged_kv_last_page_len)
        counts = [stop - start for start, stop in pairwise(qo_indptr.tolist())]
        sizes = [
            count * ((stop - start - 1) * page_size + tail)
            for count, (start, stop), tail in zip(counts, pairwise(starts), last, strict=True)
        ]
        packed, mask_indptr = [np.empty(0, np.uint8)], [0]
        if custom_mask is not None:
            assert len(custom_mask) == sum(sizes)
            packed += [
                np.packbits(part.numpy(), bitorder="little")
                for part in torch.split(custom_mask, sizes)
            ]
            mask_indptr = np.cumsum([len(part) for part in packed]).tolist()
        self._store(
            _Frozen(
                page_size,
                sm_scale,
                window_left,
                causal=causal,
                splits=not disable_split_kv,
                sees_all=not causal and custom_mask is None,
            ),
            qo_indptr=qo_indptr,
            indptr=paged_kv_indptr,
            indices=paged_kv_indices,
            last_page_len=paged_kv_last_page_len,
            mask=torch.from_numpy(np.concatenate(packed)),
            mask_indptr=torch.tensor(mask_indptr, dtype=torch.int32),
        )
        if not disable_split_kv:
            captured = self.graph is not None
            num_tokens = (self.num_rows_planned or 0) if captured else sum(counts)
            needed = partial_results(
                num_qo_heads,
                num_kv_heads,
                head_dim_qk,
                num_rows=len(counts),
                num_tokens=num_tokens,
                is_captured=captured,
            )
            room = max(WORKSPACE_BYTES, 0 if self.graph is None else self.graph.partial_bytes)
            assert needed <= room, f"no room for {needed} bytes of partial results in {room}"


@dataclass
class FakeWrappers:
    """A `WrapperFactory` that keeps what it made."""

    made: list[FakeDecode | FakeRagged] = field(default_factory=list)

    def ragged(self, graph: GraphSizes | None = None) -> FakeRagged:
        self.made.append(wrapper := FakeRagged(graph))
        return wrapper

    def with_lse(self, graph: GraphSizes | None = None) -> FakeRagged:
        return self.ragged(graph)

    def decode(self, *, group_size: int, graph: GraphSizes | None = None) -> FakeDecode:
        self.made.append(wrapper := FakeDecode(graph))
        return wrapper
