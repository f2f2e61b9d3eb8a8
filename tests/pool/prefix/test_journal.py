"""A reader of all reports of a journal knows its contents, with any events in between."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pool.prefix import journal as module
from pool.prefix.journal import PointJournal
from protos import worker_pb2
from runtime.digests import NAME_BYTES

NAMES = [bytes([number]) * NAME_BYTES for number in range(12)]


def split(joined: bytes) -> set[bytes]:
    return {joined[start : start + NAME_BYTES] for start in range(0, len(joined), NAME_BYTES)}


def applied(known: set[bytes], reports: list[worker_pb2.CacheReport]) -> set[bytes]:
    for report in reports:
        known = (set() if report.whole else known) - split(report.removed) | split(report.stored)
        assert not split(report.stored) & split(report.removed)
        assert max(len(report.stored), len(report.removed)) <= 2 * NAME_BYTES
    return known


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["store", "remove", "take", "take"]),
            st.sampled_from(NAMES),
            st.integers(0, 1),
        )
    ),
    st.integers(1, 2),
)
def test_reports_add_up_to_the_cached_blocks(
    monkeypatch: pytest.MonkeyPatch, steps: list[tuple[str, bytes, int]], num_ranks: int
) -> None:
    """With two names per report, and a whole account in place of more than two changes beyond what
    there is; of one or two data ranks, which may have the same point."""
    monkeypatch.setattr(module, "MAX_NAMES", 2)
    journal, known = PointJournal(), set[bytes]()
    ranks = [{NAMES[0]} for _ in range(num_ranks)]
    for points in ranks:
        journal.follow(points)
    with journal.watch() as watcher:
        numbers = list[int]()
        for step, name, rank in [*steps, ("take", b"", 0)]:
            points = ranks[rank % num_ranks]
            match step:
                case "store":
                    points.add(name)
                    journal.stored([name])
                case "remove" if name in points:
                    points.remove(name)
                    journal.removed([name])
                case "take":
                    reports = watcher.take()
                    numbers += [report.number for report in reports]
                    known = applied(known, reports)
                    assert known == set().union(*ranks)
                    assert watcher.take() == []
    assert numbers == list(range(watcher.num_reports))


def test_a_watcher_that_is_not_read_keeps_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_NAMES", 2)
    journal, points = PointJournal(), set[bytes]()
    journal.follow(points)
    with journal.watch() as watcher:
        assert watcher.take() == []
        for name in NAMES:
            points.add(name)
            journal.stored([name])
            points.remove(name)
            journal.removed([name])
        points.add(NAMES[3])
        journal.stored([NAMES[3]])
        assert watcher.take() == [worker_pb2.CacheReport(number=0, whole=True, stored=NAMES[3])]
