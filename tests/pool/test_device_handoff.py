"""Layers that a stage on a device passes to its transfer agent, with a simulated device."""

import pytest
import torch

from engine.core.batch import ForwardMode
from engine.core.layer_range import LayerRange
from engine.memory.layout import CacheKind, CacheSpec, PoolGeometry
from engine.memory.pools import StagePools
from engine.memory.staging import CudaCopies
from pool.stage.handoff import (
    MIN_BUFFERS,
    build_device_agent,
    layer_mark,
    layer_observer,
    max_message_bytes,
)
from runtime.clock import SystemClock
from runtime.errors import ConfigError
from testing.memory_transport import MemoryNetwork
from tests.support.device.device_memory import DeviceStage, HandCopies, HandEvent
from tests.support.kernels.batches import Row, make_batch
from tests.support.transfer.handoff import hybrid_specs, wait_until
from transfer.agent.agent import AgentLimits
from transfer.plan.copy_plan import MAX_RUN_BYTES
from transfer.plan.handoff_terms import StageSessionState

HOST = torch.device("cpu")


def test_a_batch_s_layer_is_marked_once_and_released_after_its_mark() -> None:
    network = MemoryNetwork()
    source = DeviceStage("prefill", network.transport(SystemClock()), hybrid_specs(4))
    dest = DeviceStage("decode", network.transport(SystemClock()), hybrid_specs(4))
    source.randomize(1)
    events = list[HandEvent]()

    def mark() -> HandEvent:
        events.append(HandEvent())
        return events[-1]

    observe = layer_observer(source.agent, mark)
    terms = source.terms([1, 2], 8)
    destination = dest.destination(terms, [5, 4])
    dest.agent.open_receive(terms, destination)
    dest.log.wait("s", StageSessionState.OPEN)
    source.agent.open_send(0, terms, destination)
    observe(make_batch(ForwardMode.DECODE, [Row(1, 8, (1, 2, 3)), Row(1, 4, (4, 5))]), 0)
    assert events == [], "decoding sends nothing"
    batch = make_batch(ForwardMode.PREFILL, [Row(8, 0, (1, 2)), Row(4, 0, (6,))])
    for layer_id in range(4):
        observe(batch, layer_id)
    assert len(events) == 4, "one event for all rows of a batch"
    wait_until(lambda: source.agent.stats().num_waiting_layers == 8)
    assert source.copies.num_copies == 0
    for event in events:
        event.passed = True
    dest.log.wait("s", StageSessionState.COMPLETE)
    assert source.bytes_of([1, 2]) == dest.bytes_of([5, 4])
    for stage in (source, dest):
        assert stage.agent.shutdown(5.0)
        assert stage.staging.num_lent == 0


@pytest.mark.parametrize("end", ["passed", "closed", "overdue"])
def test_cached_entries_wait_for_the_device(end: str) -> None:
    """A block is cached once the step that computes it is launched, and may be lent at once."""
    event, network = HandEvent(), MemoryNetwork()
    source = DeviceStage(
        "lender",
        network.transport(SystemClock()),
        hybrid_specs(4),
        limits=AgentLimits(layer_s=0.2 if end == "overdue" else 30.0),
        mark=lambda: event,
    )
    dest = DeviceStage("borrower", network.transport(SystemClock()), hybrid_specs(4))
    source.randomize(1)
    terms = source.terms([1, 2], 8)
    destination = dest.destination(terms, [5, 4])
    dest.agent.open_receive(terms, destination)
    dest.log.wait("s", StageSessionState.OPEN)
    source.agent.send_cached(terms, destination)
    wait_until(lambda: event.num_queries >= 3)
    assert source.copies.num_copies == 0
    if end == "passed":
        event.passed = True
        dest.log.wait("s", StageSessionState.COMPLETE)
        assert source.bytes_of([1, 2]) == dest.bytes_of([5, 4])
    elif end == "overdue":
        source.log.wait("s", StageSessionState.FAILED)
    source.agent.close("s")
    source.log.wait("s", StageSessionState.DRAINED)
    event.passed = True
    assert source.agent.stats().num_waiting_layers == 0
    for stage in (source, dest):
        assert stage.agent.shutdown(5.0)
        assert stage.staging.num_lent == 0


def test_on_the_host_nothing_is_marked() -> None:
    assert layer_mark(HOST) is None
    assert layer_mark(torch.device("cuda", 0)) is not None


def test_an_agent_on_a_device_enters_it_as_it_starts() -> None:
    pools = StagePools(PoolGeometry(4, 8, 4, LayerRange(0, 4), hybrid_specs(4)))
    copies = HandCopies()
    agent = build_device_agent(
        pools,
        copies,
        MemoryNetwork().transport(SystemClock()),
        incarnation="a",
        on_event=lambda event: None,
        pinned=False,
    )
    assert copies.num_threads == 0
    agent.start()
    assert copies.num_threads == 1
    assert agent.shutdown(5.0)


def test_a_buffer_holds_the_largest_record() -> None:
    state = CacheSpec(0, CacheKind.STATE, (32, 128, 128), "float32", 4)
    elsewhere = CacheSpec(5, CacheKind.STATE, (320, 128, 128), "float32", 4)
    geometry = PoolGeometry(4, 1, 2, LayerRange(0, 1), (state, elsewhere))
    assert max_message_bytes(geometry) == state.record_bytes == 2 << 20
    small = PoolGeometry(
        4, 2, 0, LayerRange(0, 1), (CacheSpec(0, CacheKind.KV, (2, 1, 4, 8), "bfloat16", 2),)
    )
    assert max_message_bytes(small) == MAX_RUN_BYTES
    assert MIN_BUFFERS >= 2


def test_a_device_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="device cuda:99 cannot be used for handoffs"):
        CudaCopies(torch.device("cuda", 99)).enter_thread()
