"""The part of FlashInfer that Baton uses, as protocols, and the one place that imports it.

`plan` runs on the host: it reads int32 lengths that lie on the CPU (device tensors would cost a blocking copy each) and
stores its schedule in the wrapper. `run` is device work only and is called once per layer.
"""

from typing import Protocol

import torch
from torch import Tensor

from runtime.errors import ConfigError

_WORKSPACE_BYTES = 128 << 20
_HINT = "install the extra `gpu`, or run with device cpu"


class RaggedWrapper(Protocol):
    """FlashInfer's BatchPrefillWithPagedKVCacheWrapper: rows of any number of queries."""

    def plan(self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor,
             paged_kv_last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *,
             custom_mask: Tensor | None, causal: bool, sm_scale: float, q_data_type: torch.dtype,
             kv_data_type: torch.dtype) -> None:
        """qo_indptr, paged_kv_indptr [R + 1], last_page_len [R] int32 on the CPU; indices int32 on the device;
        custom_mask [sum of queries * keys] bool."""
        ...

    def run(self, q: Tensor, paged_kv_cache: Tensor) -> Tensor:
        """q [T, heads, D]; cache [pages, 2, kv heads, page_size, D]. Returns [T, heads, D]."""
        ...


class DecodeWrapper(Protocol):
    """FlashInfer's BatchDecodeWithPagedKVCacheWrapper: one query per row."""

    def plan(self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int,
             head_dim: int, page_size: int, *, sm_scale: float, q_data_type: torch.dtype,
             kv_data_type: torch.dtype) -> None:
        """As `RaggedWrapper.plan`."""
        ...

    def run(self, q: Tensor, paged_kv_cache: Tensor) -> Tensor:
        """q [R, heads, D]; see `RaggedWrapper.run`."""
        ...


class LatentWrapper(Protocol):
    """FlashInfer's BatchMLAPagedAttentionWrapper: causal rows over compressed keys. It knows no mask."""

    def plan(self, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len_arr: Tensor, num_heads: int,
             head_dim_ckv: int, head_dim_kpe: int, page_size: int, *, causal: bool, sm_scale: float,
             q_data_type: torch.dtype, kv_data_type: torch.dtype) -> None:
        """qo_indptr, kv_indptr [R + 1], kv_len_arr [R] int32 on the CPU; kv_indices int32 on the device."""
        ...

    def run(self, q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor) -> Tensor:
        """q_nope [T, heads, latent], q_pe [T, heads, rope]; caches [pages, page_size, latent or rope]. Returns
        [T, heads, latent]."""
        ...


class WrapperFactory(Protocol):
    """Makes wrappers for one device; each has a schedule of its own."""

    def ragged(self) -> RaggedWrapper: ...

    def decode(self, *, group_size: int) -> DecodeWrapper:
        """`group_size`: query heads per kv head."""
        ...

    def latent(self) -> LatentWrapper: ...


class FlashInferWrappers:
    """A `WrapperFactory` over the installed FlashInfer."""

    # The CUDA-core decode kernel is compiled for these group sizes; others take the tensor-core one.
    _CUDA_CORE_GROUPS = frozenset({1, 2, 3, 4, 6, 8, 16})

    def __init__(self, device: torch.device) -> None:
        """Raises ConfigError when there is no CUDA device or FlashInfer cannot be imported."""
        if device.type != "cuda" or not torch.cuda.is_available():
            raise ConfigError(f"attention by FlashInfer needs a CUDA device, got {device}; {_HINT}", field="device")
        try:
            import flashinfer
            import flashinfer.mla
        except ImportError as error:
            raise ConfigError(f"attention on {device} needs FlashInfer ({error}); {_HINT}", field="device") from error
        self._library = flashinfer
        # One for all wrappers: what runs on the same stream runs one after the other.
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def ragged(self) -> RaggedWrapper:
        made: RaggedWrapper = self._library.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace, "HND", backend="fa2")  # FA3 refuses custom masks
        return made

    def decode(self, *, group_size: int) -> DecodeWrapper:
        made: DecodeWrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "HND", use_tensor_cores=group_size not in self._CUDA_CORE_GROUPS)
        return made

    def latent(self) -> LatentWrapper:
        made: LatentWrapper = self._library.mla.BatchMLAPagedAttentionWrapper(self._workspace, backend="fa2")
        return made
