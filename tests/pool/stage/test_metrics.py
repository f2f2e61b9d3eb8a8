"""A leader's instruments move with what they count, also those that a short test cluster leaves at
rest."""

import time

import pytest
import torch
from prometheus_client import CollectorRegistry, Counter

from engine.contracts.model import ExpertTokens
from engine.core.batch import ForwardMode
from engine.core.layer_range import LayerRange, Part
from engine.core.rows import Row, build_batch
from engine.memory.layout import CacheKind, CacheSpec, PoolGeometry
from pool.stage import metrics as metrics_module
from pool.stage.metrics import (
    EXPERTS_PERIOD_S,
    ExpertBalance,
    LeaderMeters,
    PoolOccupancy,
    StageCounts,
)
from protos import worker_pb2 as pb
from runtime.observe.metrics.stages import StageMetrics

GEOMETRY = PoolGeometry(
    page_size=4,
    num_pages=11,
    num_slots=5,
    layers=LayerRange(0, 2),
    specs=(
        CacheSpec(0, CacheKind.KV, (2, 1, 4, 8), "float32", 4),
        CacheSpec(1, CacheKind.STATE, (2, 4, 4), "float32", 4),
    ),
)


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


def test_load_shows_queue_memory_and_sessions() -> None:
    registry = CollectorRegistry()
    meters = LeaderMeters.create(registry, GEOMETRY)
    meters.on_load(
        pb.WorkerLoad(
            queued_requests=3, running_requests=2, pages_free=7, slots_free=1, open_sessions=2
        )
    )
    assert value(registry, "baton_queue_depth") == 3
    assert value(registry, "baton_running") == 2
    assert (value(registry, "baton_kv_pages"), value(registry, "baton_kv_pages_used")) == (10, 3)
    assert (value(registry, "baton_state_slots"), value(registry, "baton_state_slots_used")) == (
        4,
        3,
    )
    assert value(registry, "baton_kv_sessions") == 2
    assert value(registry, "baton_kv_usage_ratio") == pytest.approx(0.3)


def test_a_census_shows_the_uses_of_memory() -> None:
    registry = CollectorRegistry()
    meters = LeaderMeters.create(registry, GEOMETRY)
    meters.on_occupancy(
        PoolOccupancy({"computing": 2, "handoff": 1}, num_pages_held=5, oldest_s=1.5),
        num_draining=1,
    )
    states = {"computing": 2, "handoff": 1, "draining": 1}
    assert {state: value(registry, "baton_kv_leases", state=state) for state in states} == states
    assert value(registry, "baton_kv_pages_held_for_transfer") == 5
    assert value(registry, "baton_queue_oldest_seconds") == 1.5
    assert (
        value(registry, "baton_cache_config_info", page_size="4", num_pages="10", num_slots="4")
        == 1
    )


def test_waiting_is_a_share_of_time() -> None:
    registry = CollectorRegistry()
    meters = LeaderMeters.create(registry, GEOMETRY)
    meters._window_began_s -= 2 * metrics_module.BUBBLE_WINDOW_S
    began_s, waited_s = meters._window_began_s, metrics_module.BUBBLE_WINDOW_S
    before_s = time.monotonic()
    meters.on_wait(waited_s)
    after_s = time.monotonic()
    for _ in range(2):
        share = value(registry, "baton_pp_bubble_ratio")
        assert share is not None
        assert waited_s / (after_s - began_s) <= share <= waited_s / (before_s - began_s)
        meters.on_load(pb.WorkerLoad(running_requests=1))
    meters.on_load(pb.WorkerLoad())
    assert value(registry, "baton_pp_bubble_ratio") == 0


def test_steps_and_handoffs_are_counted() -> None:
    registry = CollectorRegistry()
    plans = {"target": 1, "draft_round": 0}  # the warm-up's
    forwards = {"graph": 4, "eager": 1}
    meters = LeaderMeters.create(
        registry, GEOMETRY, counts=StageCounts(lambda: plans, lambda: forwards)
    )
    batch = build_batch(ForwardMode.PREFILL, [Row(1, [5, 6, 7], 0, [1], 0, None)])
    assert batch.token_ids is not None
    assert torch.equal(batch.token_ids, torch.tensor([5, 6, 7]))
    meters.on_launch(0.01, batch)
    plans.update(target=2, draft_round=3)
    meters.stage.on_forward(0.0, batch)
    meters.on_frame(100)
    meters.on_step(0.02, batch)
    meters.on_handoff(num_tokens=9, seconds=0.5)  # three pages of 2 * 4 * 8 floats, one state of 32
    assert value(registry, "baton_prompt_tokens_total") == 3
    assert value(registry, "baton_batch_tokens_sum") == 6
    assert [value(registry, "baton_plans_total", path=path) for path in plans] == [2, 3]
    assert [value(registry, "baton_forwards_total", kind=kind) for kind in ("graph", "eager")] == [
        4,
        1,
    ]
    assert value(registry, "baton_pp_stage_step_seconds_sum", stage="0") == 0.01
    assert value(registry, "baton_pp_link_bytes_total", stage="0") == 100
    assert value(registry, "baton_pp_step_seconds_sum") == 0.02
    assert value(registry, "baton_kv_transfer_bytes_total", kind="kv") == 3 * 2 * 4 * 8 * 4
    assert value(registry, "baton_kv_transfer_bytes_total", kind="state") == 2 * 4 * 4 * 4
    assert value(registry, "baton_kv_transfer_seconds_sum") == 0.5


def test_a_step_looks_up_labels_of_changed_values_only(monkeypatch: pytest.MonkeyPatch) -> None:
    registry, forwards, looked_up = (
        CollectorRegistry(),
        {"graph": 0, "eager": 1},
        list[tuple[str, ...]](),
    )
    meters = LeaderMeters.create(
        registry, GEOMETRY, counts=StageCounts(lambda: {"target": 1}, lambda: forwards)
    )
    batch = build_batch(ForwardMode.PREFILL, [Row(1, [5], 0, [1], 0, None)])
    meters.on_launch(0.01, batch)
    meters.on_frame(100)
    assert value(registry, "baton_forwards_total", kind="graph") == 0, "what is zero must show"
    labels = Counter.labels

    def look_up(counter: Counter, *given: str) -> Counter:
        looked_up.append(given)
        return labels(counter, *given)

    monkeypatch.setattr(Counter, "labels", look_up)
    forwards["eager"] = 3
    meters.on_launch(0.01, batch)
    meters.on_frame(100)
    assert looked_up == [("eager",)]
    assert value(registry, "baton_forwards_total", kind="eager") == 3
    assert value(registry, "baton_pp_link_bytes_total", stage="0") == 200


def test_a_process_reports_its_own_experts_and_the_most_uneven_layer() -> None:
    registry, now = CollectorRegistry(), [0.0]
    layers = {
        3: ExpertTokens(torch.zeros(4, dtype=torch.int64), Part(2, 4, 4)),
        5: ExpertTokens(torch.zeros(4, dtype=torch.int64), Part(2, 4, 4)),
        6: ExpertTokens(torch.zeros(4, dtype=torch.int64), Part(2, 4, 4)),
    }  # of which no token has come yet
    balance = ExpertBalance(StageMetrics.create(registry), lambda: layers, clock=lambda: now[0])
    layers[3].counts.add_(torch.tensor([2, 2, 2, 2]))
    layers[5].counts.add_(torch.tensor([1, 0, 3, 4]))
    balance.on_forward()
    own = {expert: value(registry, "baton_expert_tokens_total", expert=expert) for expert in "0123"}
    assert own == {"0": None, "1": None, "2": 5, "3": 6}
    assert value(registry, "baton_expert_busiest_ratio") == 2  # 4 where 2 are the mean
    layers[5].counts.add_(torch.tensor([4, 0, 0, 0]))
    balance.on_forward()  # too soon
    assert value(registry, "baton_expert_busiest_ratio") == 2
    now[0] += EXPERTS_PERIOD_S
    balance.on_forward()
    assert value(registry, "baton_expert_busiest_ratio") == 4  # what came since
    assert value(registry, "baton_expert_tokens_total", expert="3") == 6
