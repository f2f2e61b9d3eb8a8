"""Refused messages are all counted, and fill no log."""

import logging

import pytest

from runtime.observe.metrics.stages import REFUSALS
from transfer.transport.refusals import LOG_INTERVAL_S, RefusalReason, Refusals


def test_a_flood_is_counted_and_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    now, counted = [0.0], list[RefusalReason]()
    refusals = Refusals("frames", counted.append, clock=lambda: now[0])
    with caplog.at_level(logging.WARNING):
        for _ in range(1000):
            refusals.add(RefusalReason.FOREIGN, "8 bytes")
        refusals.add(RefusalReason.REPLAYED, "a frame")
        now[0] = LOG_INTERVAL_S
        refusals.add(RefusalReason.FOREIGN, "9 bytes")
    assert [record.getMessage() for record in caplog.records] == [
        "frames: rejected 1 messages (foreign), the last: 8 bytes",
        "frames: rejected 1 messages (replayed), the last: a frame",
        "frames: rejected 1000 messages (foreign), the last: 9 bytes",
    ]
    assert refusals.counts == {RefusalReason.FOREIGN: 1001, RefusalReason.REPLAYED: 1}
    assert len(counted) == 1002


def test_every_reason_is_exported_from_the_start() -> None:
    assert {reason for reasons in REFUSALS.values() for reason in reasons} == set(RefusalReason)
