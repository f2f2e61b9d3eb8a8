import urllib.request

import pytest

from runtime.errors import ConfigError
from runtime.exposition import Exposition, new_registry
from runtime.metrics import (
    ArrivalMetrics,
    HandoffMetrics,
    LeaderMetrics,
    PoolMetrics,
    RouterMetrics,
    RpcMetrics,
    StageMetrics,
)


def test_exposition_serves_what_was_counted() -> None:
    registry = new_registry(role="decode", version="1.2.3")
    transfer = HandoffMetrics.create(registry)
    transfer.bytes_moved.labels("kv").inc(4096)
    exposition = Exposition.start(registry, port=0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{exposition.port}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        with pytest.raises(ConfigError, match=str(exposition.port)):
            Exposition.start(registry, port=exposition.port)
    finally:
        exposition.close()
    assert 'baton_kv_transfer_bytes_total{kind="kv"} 4096.0' in text
    assert 'baton_build_info{role="decode",version="1.2.3"} 1.0' in text
    assert "process_resident_memory_bytes" in text


def test_a_worker_can_hold_all_its_sets_in_one_registry() -> None:
    for kinds in ((RpcMetrics, RouterMetrics), (RpcMetrics, StageMetrics, LeaderMetrics, PoolMetrics, HandoffMetrics,
                                                  ArrivalMetrics)):
        registry = new_registry(role="x", version="0")
        for kind in kinds:
            kind.create(registry)
        names = [family.name for family in registry.collect() if not family.name.startswith(("process", "python"))]
        assert all(name.startswith("baton_") for name in names)
