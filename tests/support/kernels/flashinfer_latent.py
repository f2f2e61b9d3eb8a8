"""FlashInfer's wrapper for compressed keys by its documentation, computed row by row in fp64.

Like the real one it keeps the schedule of its last plan only, is silent about it, and insists on
lengths on the host.
"""

from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor


@dataclass
class FakeLatent:
    num_plans: int = 0

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,  # noqa: FBT001
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        for tensor in (qo_indptr, kv_indptr, kv_len_arr):
            assert (tensor.dtype, tensor.device.type) == (torch.int32, "cpu"), (
                "lengths are int32 on the CPU"
            )
        assert kv_indices.dtype == torch.int32
        assert causal
        self.queries = list(pairwise(qo_indptr.tolist()))
        self.pages = [
            kv_indices[start:stop].tolist() for start, stop in pairwise(kv_indptr.tolist())
        ]
        self.lengths, self.scale = kv_len_arr.tolist(), sm_scale
        self.shape = (num_heads, head_dim_ckv, head_dim_kpe, page_size)
        self.dtypes = (q_data_type, kv_data_type)
        self.num_plans += 1

    def run(self, q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor) -> Tensor:
        assert (q_nope.shape[1], q_nope.shape[2], q_pe.shape[2], ckv_cache.shape[1]) == self.shape
        assert (q_nope.dtype, ckv_cache.dtype) == self.dtypes
        assert all(tensor.stride(-1) == 1 for tensor in (q_nope, q_pe, ckv_cache, kpe_cache))
        assert self.queries[-1][1] == len(q_nope)
        out = torch.full_like(q_nope, float("nan"))
        for (first, stop), pages, length in zip(
            self.queries, self.pages, self.lengths, strict=True
        ):
            latents, ropes = (
                cache[pages].flatten(0, 1)[:length].double() for cache in (ckv_cache, kpe_cache)
            )
            assert 0 < length <= len(pages) * ckv_cache.shape[1]
            scores = q_nope[first:stop].double() @ latents.T + q_pe[first:stop].double() @ ropes.T
            seen = torch.ones(stop - first, length, dtype=torch.bool).tril(length - (stop - first))
            weights = (scores * self.scale).masked_fill(~seen[:, None], float("-inf")).softmax(-1)
            out[first:stop] = (weights @ latents).to(out.dtype)
        return out


@dataclass
class FakeLatentWrappers:
    """A `LatentWrapperFactory` that keeps what it made."""

    made: list[FakeLatent] = field(default_factory=list)

    def latent(self) -> FakeLatent:
        self.made.append(wrapper := FakeLatent())
        return wrapper
