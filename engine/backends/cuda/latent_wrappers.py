"""FlashInfer's wrapper for compressed keys, as a protocol, and where it is made. See `wrappers.py`:
`plan` runs on the host over int32 lengths that lie on the CPU, `run` is device work only."""

from typing import Protocol

import torch
from torch import Tensor

from engine.contracts.latent import LatentGeometry
from runtime.errors import ConfigError

_WORKSPACE_BYTES = 128 << 20
_HINT = "install the extra `gpu`, or run with device cpu"


class LatentWrapper(Protocol):
    """FlashInfer's BatchMLAPagedAttentionWrapper: rows of any number of queries, causal or not. It
    has no masks."""

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
        """qo_indptr, kv_indptr [R + 1], kv_len_arr [R] int32 on the CPU; kv_indices int32 on the
        device."""
        ...

    def run(self, q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor) -> Tensor:
        """q_nope [T, heads, latent], q_pe [T, heads, rope]; caches [pages, page_size, latent or
        rope]. Of each only the last axis need be dense. Returns [T, heads, latent]."""
        ...


class LatentWrapperFactory(Protocol):
    """Makes wrappers for one device; each has a schedule of its own."""

    def latent(self) -> LatentWrapper: ...


def is_offered_by_flashinfer(geometry: LatentGeometry, dtype: torch.dtype) -> bool:
    """Its kernels for compressed keys are those of DeepSeek's shape."""
    return (geometry.latent_dim, geometry.rope_dim) == (512, 64) and dtype in (
        torch.bfloat16,
        torch.float16,
    )


class FlashInferLatentWrappers:
    """A `LatentWrapperFactory` over the installed FlashInfer."""

    def __init__(self, device: torch.device) -> None:
        """Raises ConfigError when there is no CUDA device or FlashInfer cannot be imported."""
        if device.type != "cuda" or not torch.cuda.is_available():
            raise ConfigError(
                f"latent attention by FlashInfer needs a CUDA device, got {device}; {_HINT}",
                field="device",
            )
        try:
            import flashinfer
        except ImportError as error:
            raise ConfigError(
                f"latent attention on {device} needs FlashInfer ({error}); {_HINT}", field="device"
            ) from error
        self._library = flashinfer
        # One for all wrappers: what runs on the same stream runs one after the other.
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def latent(self) -> LatentWrapper:
        made: LatentWrapper = self._library.mla.BatchMLAPagedAttentionWrapper(
            self._workspace, backend="fa2"
        )
        return made
