"""The backends of a stage on a GPU: FlashInfer for attention, Triton kernels for the rest."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.assembly.backend_set import Capturable, DraftPools, StageBackends, StageCaches
from engine.backends.cuda.flashinfer import FlashInferAttention
from engine.backends.cuda.latent import DeviceLatentAttention
from engine.backends.cuda.latent_wrappers import FlashInferLatentWrappers, LatentWrapperFactory
from engine.backends.cuda.latent_wrappers import is_offered_by_flashinfer as are_latents_offered
from engine.backends.cuda.recurrent import DeviceRecurrent
from engine.backends.cuda.triton_wrappers import TritonWrappers, is_offered_by_flashinfer
from engine.backends.cuda.wrappers import FlashInferWrappers, WrapperFactory
from engine.contracts.attention import AttentionGeometry
from engine.contracts.latent import LatentGeometry
from engine.core.numerics import Numerics
from engine.graphs.capture import CudaCapture
from engine.kernels.device import latent as latent_kernels
from engine.kernels.device.cache import write_kv
from engine.memory.layout import CacheKind
from engine.pipeline.stage_executor import Commits
from engine.speculative.attention.draft_attention import DraftAttention
from engine.speculative.attention.multistep import MultiStepAttention
from engine.speculative.attention.multistep_device import DeviceRounds
from engine.speculative.attention.multistep_latent import MultiStepLatentAttention

# Arguments: the geometry, and the pools to read.
WrappersFor = Callable[[AttentionGeometry, Mapping[int, Tensor]], WrapperFactory]
LatentWrappersFor = Callable[[LatentGeometry, Mapping[int, Tensor]], LatentWrapperFactory | None]


@dataclass(frozen=True)
class DeviceBackends:
    """`Backends` for one CUDA device.

    Trees are verified with a custom mask, so attention commits their nodes itself. Recurrent layers
    keep one state per node.
    """

    device: torch.device
    wrappers: WrappersFor
    latent_wrappers: LatentWrappersFor
    numerics: Numerics = Numerics.FAST

    @classmethod
    def on(cls, device: torch.device) -> "DeviceBackends":
        """Return the backends for `device`.

        Raises:
            ConfigError: FlashInfer cannot be used on the device.
        """
        flashinfer = FlashInferWrappers(device)
        own = TritonWrappers(device)

        def wrappers(geometry: AttentionGeometry, kv_pools: Mapping[int, Tensor]) -> WrapperFactory:
            dtypes = {pool.dtype for pool in kv_pools.values()}
            return (
                flashinfer
                if all(is_offered_by_flashinfer(geometry, dtype) for dtype in dtypes)
                else own
            )

        def latent_wrappers(
            geometry: LatentGeometry, pools: Mapping[int, Tensor]
        ) -> LatentWrapperFactory | None:
            offered = all(are_latents_offered(geometry, pool.dtype) for pool in pools.values())
            return FlashInferLatentWrappers(device) if offered else None

        return cls(device, wrappers, latent_wrappers)

    def of_stage(
        self,
        caches: StageCaches,
        geometry: AttentionGeometry | None,
        latent: LatentGeometry | None,
        *,
        max_nodes: int,
        num_scratch: int,
    ) -> StageBackends:
        """Implement `Backends.of_stage`."""
        compressed = (
            None if latent is None else self._compressed(caches.latent, caches.index_key, latent)
        )
        wrappers = None if geometry is None else self.wrappers(geometry, caches.kv)
        paged = (
            None
            if geometry is None or wrappers is None
            else self._paged(caches.kv, geometry, wrappers)
        )
        states = DeviceRecurrent(
            conv_pools=caches.conv,
            state_pools=caches.state,
            max_nodes=max_nodes,
            num_scratch=num_scratch,
        )
        committing: list[Commits] = [
            cache for cache in (paged, compressed, states) if cache is not None
        ]
        capturable = None
        # The Triton wrappers cannot be captured.
        if paged is not None and isinstance(wrappers, FlashInferWrappers):
            capturable = Capturable(paged, states, CudaCapture(self.device), self.device)
        return StageBackends(
            paged, compressed, states, tuple(committing) if max_nodes else (), capturable
        )

    def of_draft(
        self, geometry: AttentionGeometry | LatentGeometry, pools: DraftPools
    ) -> DraftAttention:
        """Implement `Backends.of_draft`."""
        if isinstance(geometry, LatentGeometry):
            latent = pools[CacheKind.LATENT]
            index_key = pools[CacheKind.INDEX_KEY]
            return DraftAttention.over_latents(
                self._compressed(latent, index_key, geometry),
                MultiStepLatentAttention(
                    latent_pools=latent, index_pools=index_key, geometry=geometry
                ),
                geometry.page_size,
            )
        kv = pools[CacheKind.KV]
        wrappers = self.wrappers(geometry, kv)
        paged = self._paged(kv, geometry, wrappers)
        if not isinstance(wrappers, FlashInferWrappers):
            return DraftAttention.over_kv(
                paged, MultiStepAttention(kv_pools=kv, geometry=geometry), geometry.page_size
            )
        rounds = DeviceRounds(kv_pools=kv, geometry=geometry, wrappers=wrappers, device=self.device)
        return replace(
            DraftAttention.over_kv(paged, rounds, geometry.page_size),
            capturable=paged,
            capturable_round=rounds,
        )

    def _paged(
        self, kv_pools: Mapping[int, Tensor], geometry: AttentionGeometry, wrappers: WrapperFactory
    ) -> FlashInferAttention:
        return FlashInferAttention(
            kv_pools=kv_pools,
            geometry=geometry,
            wrappers=wrappers,
            device=self.device,
            write_kv=write_kv,
            numerics=self.numerics,
        )

    def _compressed(
        self,
        latent_pools: Mapping[int, Tensor],
        index_pools: Mapping[int, Tensor],
        geometry: LatentGeometry,
    ) -> DeviceLatentAttention:
        return DeviceLatentAttention(
            latent_pools=latent_pools,
            index_pools=index_pools,
            geometry=geometry,
            wrappers=self.latent_wrappers(geometry, latent_pools),
            device=self.device,
            kernels=latent_kernels,
        )
