"""The part of FlashInfer that Baton uses, as protocols, and the one place that imports it.

`plan` runs on the host: it reads int32 lengths that lie on the CPU (device tensors would cost a
blocking copy each) and stores its schedule in the wrapper. `run` is device work only and is called
once per layer.
"""

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from engine.contracts.attention import AttentionGeometry
from engine.memory.static import Fence
from runtime.errors import ConfigError

# Partial results of rows whose keys are shared out: per kv head a tile of 128 queries (64 where
# heads are wide), and as many tiles as two per multiprocessor. With 16 query heads per kv head that
# is 280 MB on 132 multiprocessors.
WORKSPACE_BYTES = 384 << 20
_HINT = "install the extra `gpu`, or run with device cpu"
_AnyWrapper = TypeVar("_AnyWrapper")


@dataclass
class Slot(Generic[_AnyWrapper]):
    """A wrapper and how often it was planned. `planned` guards the page-locked memory that a plan
    is copied from: set it behind each plan."""

    wrapper: _AnyWrapper
    planned: Fence
    epoch: int = 0

    def next_epoch(self) -> None:
        """Before each plan: wait until the device has what the one before left in that memory."""
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
        """qo_indptr, paged_kv_indptr [R + 1], last_page_len [R] int32 on the CPU; indices int32 on
        the device; custom_mask [sum of queries * keys] bool; window_left -1 for none. Without
        splits a row's sums do not depend on the other rows."""
        ...

    def run(self, q: Tensor, paged_kv_cache: Tensor) -> Tensor:
        """q [T, heads, D]; cache [pages, 2, kv heads, page_size, D]. Returns [T, heads, D]."""
        ...


class DecodeWrapper(Protocol):
    """FlashInfer's BatchDecodeWithPagedKVCacheWrapper: one query per row."""

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
        """As `RaggedWrapper.plan`."""
        ...

    def run(self, q: Tensor, paged_kv_cache: Tensor) -> Tensor:
        """q [R, heads, D]; see `RaggedWrapper.run`."""
        ...


class LseWrapper(RaggedWrapper, Protocol):
    """The same wrapper, planned without causal order: all queries of a row see all of its keys."""

    def run_return_lse(self, q: Tensor, paged_kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Also [T, heads] fp32: the base-2 logarithm of each query's sum of exponentials, to merge
        with other keys."""
        ...


@dataclass(frozen=True)
class GraphSizes:
    """Of the buffers of a wrapper whose runs are captured: rows of every plan, pages and packed
    mask at most. Without mask bytes its plans are causal. `partial_bytes`: of partial results, as
    `partial_bytes` counts them."""

    num_rows: int
    num_pages: int
    mask_bytes: int = 0
    partial_bytes: int = 0


def partial_bytes(geometry: AttentionGeometry, num_rows: int, num_tokens: int) -> int:
    """What FlashInfer sets aside in a captured forward for partial results, at most: a graph has
    room for them whether keys are shared out or not, and for tiles that any split of the tokens
    among the rows needs."""
    tile = 128 if geometry.head_dim < 256 else 64
    num_tiles = (
        -(-num_tokens * (geometry.num_heads // geometry.num_kv_heads) // tile) + num_rows - 1
    )
    return (
        geometry.num_heads * num_tiles * tile * (geometry.head_dim + 1) * 4 + 256
    )  # values, sums; their alignment


class WrapperFactory(Protocol):
    """Makes wrappers for one device; each has a schedule of its own. Those with `graph` keep it in
    buffers that never move, so that what was captured runs on the latest plan."""

    def ragged(self, graph: GraphSizes | None = None) -> RaggedWrapper: ...

    def decode(self, *, group_size: int, graph: GraphSizes | None = None) -> DecodeWrapper:
        """`group_size`: query heads per kv head."""
        ...


class LseWrapperFactory(Protocol):
    """As `WrapperFactory`, where the wrapper returns sums, too."""

    def with_lse(self, graph: GraphSizes | None = None) -> LseWrapper: ...


class LengthsBesideMask:
    """FlashInfer's wrapper for rows of any number of queries, given lengths where it looks for
    them: it packs a mask on the device and reads there where rows begin. Its plan then waits for
    the device; without a mask it does not."""

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
        """See `RaggedWrapper.plan`."""
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
        """See `RaggedWrapper.run`."""
        return self._wrapper.run(q, paged_kv_cache)


class Workspace:
    """Memory for partial results: one for all wrappers, since what runs on the same stream runs one
    after the other. Wrappers that were made before it grew keep what they were made with."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def holding(self, num_bytes: int) -> Tensor:
        if num_bytes > len(self._memory):
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._memory.device)
        return self._memory


class FlashInferWrappers:
    """A `WrapperFactory` over the installed FlashInfer."""

    # A tile of the tensor-core kernel is filled by a kv head's query heads; fewer than four leave
    # it too empty. The CUDA-core kernel knows no group of 5 or 7, and before 0.7 none of 6 or 16.
    _CUDA_CORE_GROUPS = frozenset({1, 2, 3})

    def __init__(self, device: torch.device) -> None:
        """Raises ConfigError when there is no CUDA device or FlashInfer cannot be imported."""
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
        """See `WrapperFactory.ragged`."""
        return LengthsBesideMask(self.with_lse(graph), self._device)

    def with_lse(self, graph: GraphSizes | None = None) -> LseWrapper:
        """See `LseWrapperFactory.with_lse`."""
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
        made: LseWrapper = self._library.BatchPrefillWithPagedKVCacheWrapper(
            self._room(graph), "HND", backend="fa2", **buffers
        )  # FA3 refuses custom masks
        return made

    def decode(self, *, group_size: int, graph: GraphSizes | None = None) -> DecodeWrapper:
        """See `WrapperFactory.decode`."""
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
