"""The copies that a worker reports: what its stores have, whatever happens to them."""

import random
from pathlib import Path

import pytest

from engine.core.layer_range import LayerRange, TensorRank
from pool.prefix.journal import PointWatcher
from pool.tiers import copies
from pool.tiers.block_store import BlockStore, Content, ObjectKey, StagePart
from pool.tiers.copies import ReportedCopies, WrittenBlocks
from pool.tiers.folder import CacheFolder
from pool.tiers.memory_store import MemoryStore
from runtime.digests import NAME_BYTES, split_names

PART = StagePart(LayerRange(0, 2), TensorRank())
SIZE = 64
OBJECT = (memoryview(bytes(SIZE)),)


def name(number: int) -> bytes:
    return number.to_bytes(NAME_BYTES, "big")


def key(number: int, content: Content = Content.PAGE) -> ObjectKey:
    return ObjectKey(name(number), content, PART)


class Router:
    """The points that a router knows from the reports."""

    def __init__(self) -> None:
        self.points = set[bytes]()

    def read(self, watcher: PointWatcher) -> set[int]:
        for report in watcher.take():
            if report.whole:
                self.points.clear()
            self.points |= set(split_names(report.stored))
            self.points -= set(split_names(report.removed))
        return {int.from_bytes(each, "big") for each in self.points}


def present(store: BlockStore, content: Content, count: int = 40) -> set[int]:
    parts = store.parts([name(number) for number in range(count)], content)
    return {number for number, found in enumerate(parts) if found}


@pytest.mark.parametrize("content", [Content.PAGE, Content.STATE])
@pytest.mark.parametrize("place", ["memory", "folder"])
def test_reports_have_what_the_store_has(tmp_path: Path, place: str, content: Content) -> None:
    reported = ReportedCopies(has_states=content is Content.STATE)
    limit = 16 * SIZE
    store: BlockStore = (
        MemoryStore(limit, reported.of_tier())
        if place == "memory"
        else CacheFolder(tmp_path, limit, reported.of_tier())
    )
    store.check()
    rng, router, seen = random.Random(7), Router(), list[int]()
    with reported.journal.watch() as watcher:
        for _ in range(300):
            number, kind = rng.randrange(40), rng.choice(list(Content))
            if rng.random() < 0.8:
                assert store.put(key(number, kind), OBJECT)
            else:
                store.remove(key(number, kind))
            if rng.random() < 0.3:
                known = router.read(watcher)
                assert known == present(store, content)
                seen.append(len(known))
    assert 2 <= max(seen) <= 16, "some were stored, and old ones made room"


@pytest.mark.parametrize("has_states", [0, 1])
def test_what_a_folder_has_from_before_is_reported(tmp_path: Path, has_states: int) -> None:
    before = CacheFolder(tmp_path, 100 * SIZE)
    for number in range(5):
        assert before.put(key(number), OBJECT)
    assert before.put(key(3, Content.STATE), OBJECT)
    for foreign in ("ab/notes", f"00/{'0' * 30}", "lost+found/zz" + "0" * 30):
        (tmp_path / "baton-cache" / foreign).mkdir(parents=True)
        (tmp_path / "baton-cache" / foreign / "page.0-2.0of1").write_bytes(b"")
    reported, router = ReportedCopies(has_states=bool(has_states)), Router()
    now = CacheFolder(tmp_path, 100 * SIZE, reported.of_tier())
    with reported.journal.watch() as watcher:
        assert router.read(watcher) == set()
        now.check()
        assert router.read(watcher) == ({3} if has_states else set(range(5)))
        before.remove(key(3, Content.STATE))
        for number in range(5, 9):
            assert before.put(key(number), OBJECT)
        now.use(key(number, content) for number in range(7) for content in Content)
        assert router.read(watcher) == (set() if has_states else set(range(7)))
        now.check()
        assert router.read(watcher) == (set() if has_states else set(range(9)))


def test_a_block_in_two_tiers_is_reported_until_both_have_lost_it() -> None:
    reported, router = ReportedCopies(), Router()
    host, disk = reported.of_tier(), reported.of_tier()
    with reported.journal.watch() as watcher:
        for tier in (host, disk):
            tier.stored(name(1), Content.PAGE)
        host.removed(name(1), Content.PAGE)
        assert router.read(watcher) == {1}
        disk.removed(name(1), Content.PAGE)
        assert router.read(watcher) == set()


def test_of_many_copies_a_sample_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "MAX_POINTS", 64)
    reported, router = ReportedCopies(), Router()
    tier = reported.of_tier()
    with reported.journal.watch() as watcher:
        for number in range(64):
            tier.stored(name(number), Content.PAGE)
        assert router.read(watcher) == set(range(64)), "all that there is room for"
        for number in range(64, 1000):
            tier.stored(name(number), Content.PAGE)
        sample = router.read(watcher)
        assert 16 < len(sample) <= 64
        assert min(sample) < 250, "of any age"
        assert max(sample) > 750
        for number in range(1000):
            tier.removed(name(number), Content.PAGE)
        assert router.read(watcher) == set()
        tier.found([name(number) for number in range(500)])
        assert 16 < len(router.read(watcher)) <= 64
        tier.found([name(number) for number in range(60)])
        assert router.read(watcher) == set(range(60)), "all again"


def test_written_blocks_are_those_that_fit() -> None:
    reported, router = ReportedCopies(), Router()
    with reported.journal.watch() as watcher:
        written = WrittenBlocks(3, reported.of_tier())
        names = [name(number) for number in range(10)]
        assert written.num_known(names) == 0
        written.add([name(2), name(1)])
        assert written.num_known(names) == 3
        written.add([name(7)])
        assert written.num_known(names) == 8
        written.add([name(2)])
        written.add([name(5)])
        assert router.read(watcher) == {2, 5, 7}, "the one that was not used for longest is gone"
        assert written.num_known(names[:5]) == 3
