"""Who applies all reports to a journal knows what is in it, whatever happened between them."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pool.prefix import journal as module
from pool.prefix.journal import PointJournal
from protos import worker_pb2
from runtime.digests import NAME_BYTES

NAMES = [bytes([number]) * NAME_BYTES for number in range(12)]


def split(joined: bytes) -> set[bytes]:
    return {joined[start:start + NAME_BYTES] for start in range(0, len(joined), NAME_BYTES)}


def applied(known: set[bytes], reports: list[worker_pb2.CacheReport]) -> set[bytes]:
    for report in reports:
        known = (set() if report.whole else known) - split(report.removed) | split(report.stored)
        assert not split(report.stored) & split(report.removed)
        assert max(len(report.stored), len(report.removed)) <= 2 * NAME_BYTES
    return known


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(["store", "remove", "take", "take"]), st.sampled_from(NAMES))))
def test_reports_amount_to_what_there_is(monkeypatch: pytest.MonkeyPatch, steps: list[tuple[str, bytes]]) -> None:
    """With two names per report, and a whole account in place of more than two changes beyond what there is."""
    monkeypatch.setattr(module, "MAX_NAMES", 2)
    journal, stored, known = PointJournal(), Counter([NAMES[0]]), set[bytes]()  # data ranks may have the same point
    journal.stored([NAMES[0]])
    with journal.watch() as watcher:
        numbers = list[int]()
        for step, name in [*steps, ("take", b"")]:
            match step:
                case "store":
                    stored[name] += 1
                    journal.stored([name])
                case "remove":
                    stored -= Counter([name])
                    journal.removed([name])
                case "take":
                    reports = watcher.take()
                    numbers += [report.number for report in reports]
                    known = applied(known, reports)
                    assert known == set(+stored)
                    assert watcher.take() == []
    assert numbers == list(range(watcher.num_reports))


def test_a_watcher_that_is_not_read_keeps_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_NAMES", 2)
    journal = PointJournal()
    with journal.watch() as watcher:
        assert watcher.take() == []
        for name in NAMES:
            journal.stored([name])
            journal.removed([name])
        journal.stored([NAMES[3]])
        assert watcher.take() == [worker_pb2.CacheReport(number=0, whole=True, stored=NAMES[3])]
