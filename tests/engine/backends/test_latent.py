"""Latent attention and key selection on the CPU keep the contract, bit for bit in any company."""

from collections.abc import Mapping

from torch import Tensor

from engine.backends.cpu.latent import CpuLatentAttention
from engine.contracts.latent import LatentGeometry
from tests.support.contracts.latent import LatentContract


def make(
    latent_pools: Mapping[int, Tensor], index_pools: Mapping[int, Tensor], geometry: LatentGeometry
) -> CpuLatentAttention:
    return CpuLatentAttention(latent_pools=latent_pools, index_pools=index_pools, geometry=geometry)


class TestCpu(LatentContract):
    def make(
        self,
        latent_pools: Mapping[int, Tensor],
        index_pools: Mapping[int, Tensor],
        geometry: LatentGeometry,
    ) -> CpuLatentAttention:
        return make(latent_pools, index_pools, geometry)
