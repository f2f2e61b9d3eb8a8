"""The CPU backend and the obvious one keep the same contract."""

from collections.abc import Mapping

from torch import Tensor

from engine.backends.cpu.attention import CpuAttention
from engine.backends.cpu.tree import TreeAttention
from engine.contracts.attention import AttentionGeometry
from engine.core.numerics import Numerics
from tests.support.attention import LAYER
from tests.support.contracts.attention import AttentionContract, TreeContract
from tests.support.dense_backend import DenseAttention


class TestCpuExact(AttentionContract):
    def make(self, geometry: AttentionGeometry, pool: Tensor) -> CpuAttention:
        return CpuAttention(kv_pools={LAYER: pool}, geometry=geometry, numerics=Numerics.EXACT)


class TestCpuFast(AttentionContract):
    def make(self, geometry: AttentionGeometry, pool: Tensor) -> CpuAttention:
        return CpuAttention(kv_pools={LAYER: pool}, geometry=geometry, numerics=Numerics.FAST)


class TestCpuTrees(TreeContract):
    def make(self, geometry: AttentionGeometry, pool: Tensor) -> TreeAttention:
        def over(pools: Mapping[int, Tensor]) -> CpuAttention:
            return CpuAttention(kv_pools=pools, geometry=geometry, numerics=Numerics.EXACT)

        pools = {LAYER: pool}
        return TreeAttention(paged=over(pools), kv_pools=pools, page_size=geometry.page_size, backend_over=over)


class TestDense(AttentionContract, TreeContract):
    def make(self, geometry: AttentionGeometry, pool: Tensor) -> DenseAttention:
        return DenseAttention(kv_pools={LAYER: pool}, geometry=geometry)
