"""Adapters of pools without files and stages."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from pool.request.adapter_memory import StagesAdapters
from pool.request.adapters import PoolAdapters
from runtime.observe.metrics.pools import AdapterMetrics
from tests.support.models.tiny_models import HYBRID, tiny


def no_adapters() -> PoolAdapters:
    """Return those of a pool that takes none."""

    async def hold(keys: Sequence[str]) -> None:
        assert not keys

    async def has_any(key: str) -> bool:
        return False

    return PoolAdapters(
        None,
        tiny(HYBRID),
        (),
        StagesAdapters(hold, has_any),
        AdapterMetrics.create(CollectorRegistry()),
    )
