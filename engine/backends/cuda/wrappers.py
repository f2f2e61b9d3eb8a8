"""Protocols of the FlashInfer wrappers that Baton uses, and the only import of FlashInfer for them.

`plan` runs on the host. It reads int32 lengths on the CPU (device tensors would cost a blocking
copy each) and stores its schedule in the wrapper. `run` is device work only and is called once per
layer.
"""

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from engine.contracts.attention import AttentionGeometry
from engine.memory.static import Fence
from runtime.errors import ConfigError

# Size of the partial results of rows whose keys are split: per kv head a tile of 128 queries (64
# for wide heads), and two tiles per multiprocessor. With 16 query heads per kv head this is 280 MB
# on 132 multiprocessors.
WORKSPACE_BYTES = 384 << 20
_HINT = "install the extra `gpu`, or run with device cpu"
_AnyWrapper = TypeVar("_AnyWrapper")


@dataclass
class Slot(Generic[_AnyWrapper]):
    """A wrapper and the number of its plans.

    `planned` guards the page-locked memory that a plan is copied from. Set it after each plan.
    """

    wrapper: _AnyWrapper
    planned: Fence
    epoch: int = 0

    def next_epoch(self) -> None:
        """Start the next plan after the device has copied the previous one."""
        self.planned.wait()
        self.epoch += 1


class RaggedWrapper(Protocol):
    """FlashInfer's BatchPrefillWithPagedKVCacheWrapper: rows of any number of queries."""

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
        """Plan the next runs.

        qo_indptr and paged_kv_indptr [R + 1] and last_page_len [R] are int32 on the CPU; indices is
        int32 on the device; custom_mask is [sum of queries * keys] bool; window_left is -1 for
        none. With `disable_split_kv` a row's sums do not depend on the other rows.
        """
        ...

    def run(self, q: Tensor, paged_kv_cache: Tensor) -> Tensor:
        """Attend with q [T, heads, D] and return [T, heads, D].

        The cache is [pages, 2, kv heads, page_size, D].
        """
        ...


class DecodeWrapper(Protocol):
    """The protocol of FlashInfer's BatchDecodeWithPagedKVCacheWrapper: one query per row."""

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
        """Plan the next runs, with the tensors of `RaggedWrapper.plan`."""
        ...

    def run(self, q: Tensor, paged_kv_cache: Tensor) -> Tensor:
        """Attend with q [R, heads, D], as `RaggedWrapper.run` does."""
        ...


class LseWrapper(RaggedWrapper, Protocol):
    """A `RaggedWrapper` without causal order: all queries of a row see all of its keys."""

    def run_return_lse(self, q: Tensor, paged_kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Attend and also return [T, heads] fp32, for merging with other keys.

        The values are the base-2 logarithms of each query's sum of exponentials.
        """
        ...


@dataclass(frozen=True)
class GraphSizes:
    """Buffer sizes of a wrapper whose runs are captured.

    `num_rows` is the number of rows of every plan; the other values are maxima. Without mask bytes
    the plans are causal. `partial_bytes` is the size of partial results, as computed by the
    function `partial_bytes`.
    """

    num_rows: int
    num_pages: int
    mask_bytes: int = 0
    partial_bytes: int = 0


def partial_bytes(geometry: AttentionGeometry, num_rows: int, num_tokens: int) -> int:
    """Return the maximum size that FlashInfer reserves for partial results in a captured forward.

    A graph has space for them whether or not keys are split, and for the tiles of any division of
    the tokens among the rows.
    """
    tile = 128 if geometry.head_dim < 256 else 64
    num_tiles = (
        -(-num_tokens * (geometry.num_heads // geometry.num_kv_heads) // tile) + num_rows - 1
    )
    # Values and sums, and their alignment.
    return geometry.num_heads * num_tiles * tile * (geometry.head_dim + 1) * 4 + 256


class WrapperFactory(Protocol):
    """A factory of wrappers for one device, each with its own schedule.

    A wrapper with `graph` keeps its schedule in buffers at fixed addresses, so that a captured run
    uses the latest plan.
    """

    def ragged(self, graph: GraphSizes | None = None) -> RaggedWrapper: ...

    def decode(self, *, group_size: int, graph: GraphSizes | None = None) -> DecodeWrapper:
        """Create a decode wrapper; `group_size` is the number of query heads per kv head."""
        ...


class LseWrapperFactory(Protocol):
    """A factory of wrappers that also return sums."""

    def with_lse(self, graph: GraphSizes | None = None) -> LseWrapper: ...


class LengthsBesideMask:
    """FlashInfer's wrapper for ragged rows, with lengths in the memory it expects.

    With a mask the wrapper reads the lengths on the device, because it packs the mask there. Its
    plan then waits for the device; without a mask it does not.
    """

    def __init__(self, wrapper: RaggedWrapper, device: torch.device) -> None:
        self._wrapper = wrapper
        self._device = device

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
        if custom_mask is not None:
            qo_indptr, paged_kv_indptr, paged_kv_last_page_len = (
                lengths.to(self._device)
                for lengths in (qo_indptr, paged_kv_indptr, paged_kv_last_page_len)
            )
        self._wrapper.plan(
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            page_size,
            custom_mask=custom_mask,
            causal=causal,
            sm_scale=sm_scale,
            window_left=window_left,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            disable_split_kv=disable_split_kv,
        )

    def run(self, q: Tensor, paged_kv_cache: Tensor) -> Tensor:
        """Implement `RaggedWrapper.run`."""
        return self._wrapper.run(q, paged_kv_cache)


class Workspace:
    """Memory for partial results, shared by all wrappers.

    Sharing is safe, because work on the same stream runs in order. After growth, earlier wrappers
    keep their original memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def holding(self, num_bytes: int) -> Tensor:
        if num_bytes > len(self._memory):
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._memory.device)
        return self._memory


class FlashInferWrappers:
    """A `WrapperFactory` over the installed FlashInfer."""

    # The query heads of a kv head fill a tile of the tensor-core kernel; fewer than four leave it
    # mostly empty. The CUDA-core kernel does not support groups of 5 or 7, nor, before 0.7, of 6 or
    # 16.
    _CUDA_CORE_GROUPS = frozenset({1, 2, 3})

    def __init__(self, device: torch.device) -> None:
        """Import FlashInfer and allocate the workspace.

        Raises:
            ConfigError: there is no CUDA device, or FlashInfer cannot be imported.
        """
        if device.type != "cuda" or not torch.cuda.is_available():
            raise ConfigError(
                f"attention by FlashInfer needs a CUDA device, got {device}; {_HINT}",
                field="device",
            )
        try:
            import flashinfer
        except ImportError as error:
            raise ConfigError(
                f"attention on {device} needs FlashInfer ({error}); {_HINT}", field="device"
            ) from error
        self._library = flashinfer
        self._device = device
        self._workspace = Workspace(device)

    def ragged(self, graph: GraphSizes | None = None) -> RaggedWrapper:
        """Implement `WrapperFactory.ragged`."""
        return LengthsBesideMask(self.with_lse(graph), self._device)

    def with_lse(self, graph: GraphSizes | None = None) -> LseWrapper:
        """Implement `LseWrapperFactory.with_lse`."""
        buffers = (
            {}
            if graph is None
            else {
                "use_cuda_graph": True,
                "qo_indptr_buf": self._ints(graph.num_rows + 1),
                "paged_kv_indptr_buf": self._ints(graph.num_rows + 1),
                "paged_kv_indices_buf": self._ints(graph.num_pages),
                "paged_kv_last_page_len_buf": self._ints(graph.num_rows),
            }
        )
        if graph is not None and graph.mask_bytes:
            buffers["custom_mask_buf"] = torch.zeros(
                graph.mask_bytes, dtype=torch.uint8, device=self._device
            )
            buffers["mask_indptr_buf"] = self._ints(graph.num_rows + 1)
        # FA3 does not support custom masks.
        made: LseWrapper = self._library.BatchPrefillWithPagedKVCacheWrapper(
            self._room(graph), "HND", backend="fa2", **buffers
        )
        return made

    def decode(self, *, group_size: int, graph: GraphSizes | None = None) -> DecodeWrapper:
        """Implement `WrapperFactory.decode`."""
        buffers = (
            {}
            if graph is None
            else {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": self._ints(graph.num_rows + 1),
                "paged_kv_indices_buffer": self._ints(graph.num_pages),
                "paged_kv_last_page_len_buffer": self._ints(graph.num_rows),
            }
        )
        made: DecodeWrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._room(graph),
            "HND",
            use_tensor_cores=group_size not in self._CUDA_CORE_GROUPS,
            **buffers,
        )
        return made

    def _room(self, graph: GraphSizes | None) -> Tensor:
        return self._workspace.holding(0 if graph is None else graph.partial_bytes)

    def _ints(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self._device)
