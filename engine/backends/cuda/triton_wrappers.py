"""Wrappers with FlashInfer's interface over a Triton kernel, for heads without FlashInfer kernels.

FlashInfer's kernels need at least 64 dimensions per head and bf16 or fp16; the shipped demo model
has narrower heads. The wrappers are for correctness: each token reads its keys separately, which is
slow for long prompts of large models.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.cuda.wrappers import GraphSizes
from engine.contracts.attention import AttentionGeometry
from engine.kernels.device.paged import paged_attention
from runtime.errors import InternalError

_FLASHINFER_DIMS = frozenset({64, 128, 256})
_FLASHINFER_DTYPES = frozenset({torch.bfloat16, torch.float16})


def is_offered_by_flashinfer(geometry: AttentionGeometry, dtype: torch.dtype) -> bool:
    return geometry.head_dim in _FLASHINFER_DIMS and dtype in _FLASHINFER_DTYPES


@dataclass(frozen=True)
class _Schedule:
    """The arguments of `paged_attention`, on the device."""

    indices: Tensor
    first_pages: Tensor
    begins: Tensor
    limits: Tensor
    mask: Tensor | None
    mask_starts: Tensor
    scale: float


class _TritonWrapper:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._schedule: _Schedule | None = None

    def run(self, q: Tensor, paged_kv_cache: Tensor) -> Tensor:
        """Implement `engine.backends.cuda.wrappers.RaggedWrapper.run`."""
        planned = self._schedule
        if planned is None:
            raise InternalError("an attention wrapper was run before it was planned")
        return paged_attention(
            q,
            paged_kv_cache,
            planned.indices,
            planned.first_pages,
            planned.begins,
            planned.limits,
            planned.mask,
            planned.mask_starts,
            scale=planned.scale,
        )

    def _store(
        self,
        query_lens: Tensor,
        indptr: Tensor,
        indices: Tensor,
        num_keys: Tensor,
        mask: Tensor | None,
        scale: float,
        *,
        causal: bool,
        window: int,
    ) -> None:
        """Store the schedule of rows; query_lens and num_keys are [R] on the host."""
        rows = torch.repeat_interleave(torch.arange(len(query_lens)), query_lens)
        ends = query_lens.cumsum(0)
        place = torch.arange(len(rows)) - (ends - query_lens)[rows]  # index of a token in its row
        positions = (num_keys - query_lens)[rows] + place
        sizes = (query_lens * num_keys).long()
        mask_starts = (sizes.cumsum(0) - sizes)[rows] + place * num_keys[rows]
        begins = (positions - window).clamp(min=0) if window >= 0 else torch.zeros_like(positions)
        per_token = (
            indptr[:-1][rows],
            begins,
            positions + 1 if causal else num_keys[rows],
            mask_starts,
        )
        first_pages, begins, limits, mask_starts = (part.to(self._device) for part in per_token)
        self._schedule = _Schedule(indices, first_pages, begins, limits, mask, mask_starts, scale)


class TritonRagged(_TritonWrapper):
    """A `RaggedWrapper`."""

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
        """Implement `RaggedWrapper.plan`."""
        num_keys = _num_keys(paged_kv_indptr, paged_kv_last_page_len, page_size)
        self._store(
            qo_indptr.diff(),
            paged_kv_indptr,
            paged_kv_indices,
            num_keys,
            custom_mask,
            sm_scale,
            causal=causal,
            window=window_left,
        )


class TritonDecode(_TritonWrapper):
    """A `DecodeWrapper`."""

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
        """Implement `DecodeWrapper.plan`."""
        num_keys = _num_keys(indptr, last_page_len, page_size)
        self._store(
            torch.ones_like(num_keys),
            indptr,
            indices,
            num_keys,
            None,
            sm_scale,
            causal=False,
            window=window_left,
        )


@dataclass(frozen=True)
class TritonWrappers:
    """A `WrapperFactory`."""

    device: torch.device

    def ragged(self, graph: GraphSizes | None = None) -> TritonRagged:
        """Implement `WrapperFactory.ragged`.

        Raises:
            InternalError: the wrapper is to be captured.
        """
        _refuse_capture(graph)
        return TritonRagged(self.device)

    def decode(self, *, group_size: int, graph: GraphSizes | None = None) -> TritonDecode:
        """Implement `WrapperFactory.decode`.

        Raises:
            InternalError: the wrapper is to be captured.
        """
        _refuse_capture(graph)
        return TritonDecode(self.device)


def _refuse_capture(graph: GraphSizes | None) -> None:
    if graph is not None:
        raise InternalError(
            "these wrappers allocate new tensors for every plan, so they cannot be captured"
        )


def _num_keys(indptr: Tensor, last_page_len: Tensor, page_size: int) -> Tensor:
    return (indptr.diff() - 1) * page_size + last_page_len
