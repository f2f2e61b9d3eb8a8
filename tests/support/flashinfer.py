"""FlashInfer's wrappers by their documentation, computed row by row in fp64.

Like the real ones they keep the schedule of the last plan only and are silent about it; and they insist on lengths that
lie on the host.
"""

from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor


@dataclass
class _Schedule:
    """What a plan leaves behind. One entry per row: queries, the slots of its keys; and who sees what."""

    num_queries: list[int]
    pages: list[list[int]]
    num_keys: list[int]
    masks: list[Tensor]
    page_size: int
    scale: float


def _host(*tensors: Tensor) -> list[list[int]]:
    for tensor in tensors:
        assert (tensor.dtype, tensor.device.type) == (torch.int32, "cpu"), "lengths are int32 on the CPU"
    return [tensor.tolist() for tensor in tensors]


def _pieces(indptr: list[int], values: list[int]) -> list[list[int]]:
    assert (indptr[0], indptr[-1]) == (0, len(values))
    return [values[start:stop] for start, stop in pairwise(indptr)]


class _Paged:
    def __init__(self) -> None:
        self.schedule: _Schedule | None = None
        self.num_plans = 0

    def _store(self, schedule: _Schedule) -> None:
        self.schedule = schedule
        self.num_plans += 1

    def run(self, q: Tensor, paged_kv_cache: Tensor) -> Tensor:
        schedule = self.schedule
        assert schedule is not None
        assert len(q) == sum(schedule.num_queries)
        share = q.shape[1] // paged_kv_cache.shape[2]
        out, start = torch.empty_like(q), 0
        for count, pages, length, mask in zip(schedule.num_queries, schedule.pages, schedule.num_keys, schedule.masks,
                                              strict=True):
            entries = paged_kv_cache[pages].double().permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
            keys, values = entries.repeat_interleave(share, 1)
            queries = q[start : start + count].double().transpose(0, 1)
            scores = (queries @ keys.transpose(1, 2) * schedule.scale).masked_fill(~mask, float("-inf"))
            out[start : start + count] = (scores.softmax(-1) @ values).transpose(0, 1).to(q.dtype)
            start += count
        return out


class FakeDecode(_Paged):
    def plan(self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int,
             head_dim: int, page_size: int, *, sm_scale: float, q_data_type: torch.dtype,
             kv_data_type: torch.dtype) -> None:
        starts, last = _host(indptr, last_page_len)
        pages = _pieces(starts, indices.tolist())
        lengths = [(len(row) - 1) * page_size + tail for row, tail in zip(pages, last, strict=True)]
        masks = [torch.ones(1, length, dtype=torch.bool) for length in lengths]
        self._store(_Schedule([1] * len(pages), pages, lengths, masks, page_size, sm_scale))


class FakeRagged(_Paged):
    def plan(self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor,
             paged_kv_last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *,
             custom_mask: Tensor | None, causal: bool, sm_scale: float, q_data_type: torch.dtype,
             kv_data_type: torch.dtype) -> None:
        queries, starts, last = _host(qo_indptr, paged_kv_indptr, paged_kv_last_page_len)
        counts = [stop - start for start, stop in pairwise(queries)]
        pages = _pieces(starts, paged_kv_indices.tolist())
        lengths = [(len(row) - 1) * page_size + tail for row, tail in zip(pages, last, strict=True)]
        sizes = [count * length for count, length in zip(counts, lengths, strict=True)]
        if custom_mask is not None:
            assert not causal
            assert len(custom_mask) == sum(sizes)
            parts = torch.split(custom_mask, sizes)
            masks = [part.view(count, length) for part, count, length in zip(parts, counts, lengths, strict=True)]
        else:
            assert causal
            masks = [torch.ones(count, length, dtype=torch.bool).tril(length - count)
                     for count, length in zip(counts, lengths, strict=True)]
        self._store(_Schedule(counts, pages, lengths, masks, page_size, sm_scale))


class FakeLatent:
    """One causal row after the other over compressed keys."""

    def __init__(self) -> None:
        self.schedule: _Schedule | None = None

    def plan(self, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len_arr: Tensor, num_heads: int,
             head_dim_ckv: int, head_dim_kpe: int, page_size: int, *, causal: bool, sm_scale: float,
             q_data_type: torch.dtype, kv_data_type: torch.dtype) -> None:
        assert causal
        queries, starts, lengths = _host(qo_indptr, kv_indptr, kv_len_arr)
        counts = [stop - start for start, stop in pairwise(queries)]
        masks = [torch.ones(count, length, dtype=torch.bool).tril(length - count)
                 for count, length in zip(counts, lengths, strict=True)]
        self.schedule = _Schedule(counts, _pieces(starts, kv_indices.tolist()), lengths, masks, page_size, sm_scale)

    def run(self, q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor) -> Tensor:
        schedule = self.schedule
        assert schedule is not None
        out, start = torch.empty_like(q_nope), 0
        for count, pages, length, mask in zip(schedule.num_queries, schedule.pages, schedule.num_keys, schedule.masks,
                                              strict=True):
            latent, rope = (cache[pages].flatten(0, 1)[:length].double() for cache in (ckv_cache, kpe_cache))
            rows = slice(start, start + count)
            scores = torch.einsum("thd,sd->hts", q_nope[rows].double(), latent)
            scores += torch.einsum("thd,sd->hts", q_pe[rows].double(), rope)
            weights = (scores * schedule.scale).masked_fill(~mask, float("-inf")).softmax(-1)
            out[rows] = torch.einsum("hts,sd->thd", weights, latent).to(out.dtype)
            start += count
        return out


@dataclass
class FakeWrappers:
    """A `WrapperFactory` that keeps what it made."""

    made: list[FakeDecode | FakeRagged | FakeLatent] = field(default_factory=list)

    def ragged(self) -> FakeRagged:
        self.made.append(wrapper := FakeRagged())
        return wrapper

    def decode(self, *, group_size: int) -> FakeDecode:
        self.made.append(wrapper := FakeDecode())
        return wrapper

    def latent(self) -> FakeLatent:
        self.made.append(wrapper := FakeLatent())
        return wrapper
