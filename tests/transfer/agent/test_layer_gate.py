"""Layers are released when the device has passed them, never before, and never out of turn."""

import pytest

from runtime.clock import ManualClock
from runtime.errors import HandoffError
from tests.support.device.device_memory import HandEvent
from transfer.agent.prompts import LOOK_AHEAD, POLL_S, DoneLayer, LayerGate


class Gate(LayerGate):
    """Asks whenever it is asked."""

    def __init__(self, *, limit: int = 100, timeout_s: float = 5.0) -> None:
        self.clock = ManualClock()
        super().__init__(self.clock, limit=limit, timeout_s=timeout_s)

    def passed(self) -> list[DoneLayer]:
        self.clock.advance(POLL_S)
        return super().passed()


def test_a_layer_waits_for_its_event() -> None:
    gate, events = Gate(), [HandEvent() for _ in range(3)]
    layers = [DoneLayer(1, layer_id, 8) for layer_id in range(3)]
    for layer, event in zip(layers, events, strict=True):
        gate.add(layer, event)
    assert gate.passed() == []
    events[0].passed = True
    assert gate.passed() == layers[:1]
    assert gate.passed() == []
    events[1].passed = events[2].passed = True
    assert gate.passed() == layers[1:]
    assert gate.num_waiting == 0


def test_out_of_order_events_release_other_layers_but_no_later_chunk() -> None:
    gate, first, second, other = Gate(), HandEvent(), HandEvent(passed=True), HandEvent(passed=True)
    gate.add(DoneLayer(1, 0, 8), first)
    gate.add(DoneLayer(1, 0, 16), second)
    gate.add(DoneLayer(1, 1, 8), other)
    gate.add(DoneLayer(2, 0, 8), other)
    assert gate.passed() == [DoneLayer(1, 1, 8), DoneLayer(2, 0, 8)], (
        "16 tokens are not done while the first 8 are not"
    )
    first.passed = True
    assert gate.passed() == [DoneLayer(1, 0, 8), DoneLayer(1, 0, 16)]


def test_all_rows_of_a_batch_share_one_question() -> None:
    gate, event = Gate(), HandEvent()
    for request_key in range(20):
        gate.add(DoneLayer(request_key, 3, 8), event)
    gate.passed()
    assert event.num_queries == 1
    event.passed = True
    assert len(gate.passed()) == 20


def test_few_events_are_queried_at_a_time_and_not_too_often() -> None:
    gate, events = Gate(), [HandEvent() for _ in range(50)]
    for layer_id, event in enumerate(events):
        gate.add(DoneLayer(1, layer_id, 8), event)
    gate.passed()
    assert LayerGate.passed(gate) == []
    assert [event.num_queries for event in events] == [1] * LOOK_AHEAD + [0] * (50 - LOOK_AHEAD)


def test_an_event_that_never_passes_fails_its_request_and_no_other() -> None:
    gate, never = Gate(timeout_s=5.0), HandEvent()
    gate.add(DoneLayer(1, 3, 8), never)
    gate.add(DoneLayer(1, 4, 8), never)
    gate.clock.advance(3.0)
    gate.add(DoneLayer(2, 3, 8), later := HandEvent())
    assert gate.overdue() == {}
    gate.clock.advance(2.0)
    errors = gate.overdue()
    assert errors.keys() == {1}
    assert "layer 3 was not done 5.0 s after its launch on the device" in str(errors[1])
    assert gate.overdue() == {}
    later.passed = True
    assert gate.passed() == [DoneLayer(2, 3, 8)]


def test_too_many_layers_are_refused() -> None:
    gate, event = Gate(limit=2), HandEvent()
    gate.add(DoneLayer(1, 0, 8), event)
    gate.add(DoneLayer(1, 1, 8), event)
    with pytest.raises(HandoffError, match="2 layers wait for the device"):
        gate.add(DoneLayer(1, 2, 8), event)


def test_a_closed_request_is_not_waited_for() -> None:
    gate, event = Gate(), HandEvent()
    gate.add(DoneLayer(1, 0, 8), event)
    gate.add(DoneLayer(2, 0, 8), event)
    gate.forget(1)
    event.passed = True
    assert gate.passed() == [DoneLayer(2, 0, 8)]
    gate.add(DoneLayer(2, 1, 8), event)
    gate.clear()
    assert gate.passed() == []
    assert gate.num_waiting == 0
