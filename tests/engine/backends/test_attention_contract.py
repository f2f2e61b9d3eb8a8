"""The CPU backend and the obvious one keep the same contract."""

from torch import Tensor

from engine.backends.cpu.attention import CpuAttention
from engine.contracts.attention import AttentionGeometry
from engine.core.numerics import Numerics
from tests.support.contracts.attention import AttentionContract
from tests.support.kernels.attention import LAYER
from tests.support.kernels.dense_backend import DenseAttention


class TestCpuExact(AttentionContract):
    def make(self, geometry: AttentionGeometry, pool: Tensor) -> CpuAttention:
        return CpuAttention(kv_pools={LAYER: pool}, geometry=geometry, numerics=Numerics.EXACT)


class TestCpuFast(AttentionContract):
    def make(self, geometry: AttentionGeometry, pool: Tensor) -> CpuAttention:
        return CpuAttention(kv_pools={LAYER: pool}, geometry=geometry, numerics=Numerics.FAST)


class TestDense(AttentionContract):
    def make(self, geometry: AttentionGeometry, pool: Tensor) -> DenseAttention:
        return DenseAttention(kv_pools={LAYER: pool}, geometry=geometry)
