"""The CPU backend and the obvious one keep the same contract."""

import pytest
from torch import Tensor

from engine.backends.cpu import attention
from engine.backends.cpu.attention import CpuAttention
from engine.contracts.attention import AttentionGeometry
from tests.support.contracts.attention import AttentionContract, SinkContract, TreeContract
from tests.support.kernels.attention import LAYER
from tests.support.kernels.dense_backend import DenseAttention


class TestCpu(AttentionContract, SinkContract, TreeContract):
    def make(self, geometry: AttentionGeometry, pool: Tensor) -> CpuAttention:
        return CpuAttention(kv_pools={LAYER: pool}, geometry=geometry)


class TestCpuByToken(AttentionContract, SinkContract, TreeContract):
    """Pages of a type that no kernel supports."""

    def make(self, geometry: AttentionGeometry, pool: Tensor) -> CpuAttention:
        return CpuAttention(kv_pools={LAYER: pool}, geometry=geometry)

    @pytest.fixture(autouse=True)
    def _no_kernels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(attention, "has_kernels", lambda *dtypes: False)


class TestDense(AttentionContract, SinkContract, TreeContract):
    def make(self, geometry: AttentionGeometry, pool: Tensor) -> DenseAttention:
        return DenseAttention(kv_pools={LAYER: pool}, geometry=geometry)
