"""The backends of a stage on the host."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.assembly.backend_set import DraftPools, StageBackends, StageCaches
from engine.backends.cpu.attention import CpuAttention
from engine.backends.cpu.latent import CpuLatentAttention
from engine.backends.cpu.recurrent import CpuRecurrent
from engine.backends.recurrent_tree import TreeRecurrent
from engine.contracts.attention import AttentionGeometry
from engine.contracts.latent import LatentGeometry
from engine.core.numerics import HOST, Numerics
from engine.kernels.host.codegen.compiled import has_kernels
from engine.memory.layout import CacheKind
from engine.speculative.attention.draft_attention import DraftAttention
from engine.speculative.attention.multistep import MultiStepAttention
from engine.speculative.attention.multistep_latent import MultiStepLatentAttention
from engine.speculative.attention.multistep_paged import PagedRounds


@dataclass(frozen=True)
class CpuBackends:
    """`Backends` in plain torch, with its own exact numerics."""

    numerics: Numerics
    device: torch.device = HOST

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
        paged = (
            None
            if geometry is None
            else CpuAttention(kv_pools=caches.kv, window_pools=caches.window, geometry=geometry)
        )
        slots = self._recurrent(caches.conv, caches.state)
        compressed = (
            None
            if latent is None
            else CpuLatentAttention(
                latent_pools=caches.latent, index_pools=caches.index_key, geometry=latent
            )
        )
        # Other backends decide by values on the host, or read pages that new pages replace.
        can_record = (
            paged is not None
            and not caches.window
            and all(
                has_kernels(pool.dtype)
                for pools in (caches.kv, caches.conv)
                for pool in pools.values()
            )
        )
        if not max_nodes:
            return StageBackends(
                paged,
                compressed,
                slots,
                (paged,) if paged is not None and caches.window else (),
                states=slots if can_record else None,
            )
        trees = TreeRecurrent(
            slots=slots,
            conv_pools=caches.conv,
            state_pools=caches.state,
            max_nodes=max_nodes,
            num_scratch=num_scratch,
            backend_over=self._recurrent,
        )
        return StageBackends(
            paged,
            compressed,
            trees,
            tuple(cache for cache in (paged, compressed, trees) if cache is not None),
            states=trees if can_record else None,
        )

    def of_draft(
        self, geometry: AttentionGeometry | LatentGeometry, pools: DraftPools
    ) -> DraftAttention:
        """Implement `Backends.of_draft`."""
        if isinstance(geometry, AttentionGeometry):
            kv = pools[CacheKind.KV]
            attention = DraftAttention.over_kv(
                CpuAttention(kv_pools=kv, geometry=geometry),
                MultiStepAttention(kv_pools=kv, geometry=geometry),
                geometry.page_size,
            )
            if not all(has_kernels(pool.dtype) for pool in kv.values()):
                return attention
            return replace(attention, recordable_round=PagedRounds(kv_pools=kv, geometry=geometry))
        latent = pools[CacheKind.LATENT]
        index = pools[CacheKind.INDEX_KEY]
        return DraftAttention.over_latents(
            CpuLatentAttention(latent_pools=latent, index_pools=index, geometry=geometry),
            MultiStepLatentAttention(latent_pools=latent, index_pools=index, geometry=geometry),
            geometry.page_size,
        )

    def _recurrent(
        self, conv_pools: Mapping[int, Tensor], state_pools: Mapping[int, Tensor]
    ) -> CpuRecurrent:
        return CpuRecurrent(conv_pools=conv_pools, state_pools=state_pools, numerics=self.numerics)
