"""The folder of a disk cache: its limit, its order of removal, and its privacy."""

import errno
import os
import time
from pathlib import Path

import pytest

from engine.core.layer_range import LayerRange, TensorRank
from pool.tiers.block_store import Content, ObjectKey, StagePart
from pool.tiers.folder import ABANDONED_S, FOLDER, CacheFolder
from runtime.errors import ConfigError

PART = StagePart(LayerRange(0, 2), TensorRank())
SIZE = 100


def key(number: int) -> ObjectKey:
    return ObjectKey(number.to_bytes(16, "little"), Content.PAGE, PART)


def put(folder: CacheFolder, number: int, *, age_s: float = 0.0) -> Path:
    """Write a file that was used some time ago."""
    path = Path(folder.path_of(key(number)))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(SIZE))
    used_s = time.time() - age_s
    os.utime(path, (used_s, used_s))
    return path


def test_the_files_that_were_not_used_for_longest_go_first(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path, 16 * SIZE)
    paths = [put(folder, number, age_s=number) for number in range(20)]
    folder.use([key(18), key(19), key(20)])
    folder.check()
    kept = [number for number, path in enumerate(paths) if path.exists()]
    assert kept == [*range(13), 18, 19], (
        "and there is room for what is written until the next check"
    )
    assert folder.num_bytes == 15 * SIZE
    assert not paths[15].parent.exists()
    names = [key(number).block for number in (0, 15)]
    assert [list(parts) for parts in folder.parts(names, Content.PAGE)] == [[PART], []]


def test_what_is_written_stays_within_the_limit(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path, 32 * SIZE)
    for number in range(200):
        put(folder, number, age_s=1000 - number)
        assert folder.put(key(number), [memoryview(bytes(SIZE))])
        held = sum(path.stat().st_size for path in tmp_path.rglob("page.*"))
        assert held <= 32 * SIZE
    assert held >= 28 * SIZE


def refuse(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Have every write fail."""

    def write(*arguments: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "writev", write)


def test_a_full_disk_makes_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CacheFolder(tmp_path, 1000 * SIZE)
    paths = [put(folder, number, age_s=number) for number in range(32)]
    refuse(monkeypatch, errno.ENOSPC)
    for number in range(40, 45):
        assert not folder.put(key(number), [memoryview(bytes(SIZE))])
    assert [path.exists() for path in paths] == [True] * 30 + [False] * 2
    assert len(caplog.records) == 1, "five errors at once are one warning, and remove files once"


def test_other_errors_remove_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = CacheFolder(tmp_path, 1000 * SIZE)
    path = put(folder, 1)
    refuse(monkeypatch, errno.EIO)
    assert not folder.put(key(2), [memoryview(bytes(SIZE))])
    assert path.exists()


def test_unfinished_files_go_once_they_are_old(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path, 100 * SIZE)
    path = put(folder, 1)
    fresh, old = path.with_name(".page.1"), path.with_name(".page.2")
    for each in (fresh, old):
        each.write_bytes(bytes(SIZE))
    os.utime(old, (time.time() - 2 * ABANDONED_S,) * 2)
    folder.check()
    assert [each.exists() for each in (path, fresh, old)] == [True, True, False]


def test_only_blocks_are_removed(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path, SIZE)
    put(folder, 1)
    others = [tmp_path / "mine", tmp_path / FOLDER / "mine", tmp_path / FOLDER / "ab" / "mine"]
    (tmp_path / FOLDER / "ab").mkdir()
    for path in others:
        path.write_bytes(bytes(10 * SIZE))
    folder.check()
    assert [path.exists() for path in others] == [True, True, True]
    assert not list(tmp_path.rglob("page.*"))


def test_a_folder_open_to_others_is_refused(tmp_path: Path) -> None:
    CacheFolder(tmp_path, SIZE)
    assert (tmp_path / FOLDER).stat().st_mode & 0o777 == 0o700
    (tmp_path / FOLDER).chmod(0o2770)  # as of a volume of Kubernetes
    CacheFolder(tmp_path, SIZE)
    (tmp_path / FOLDER).chmod(0o705)
    with pytest.raises(ConfigError, match="must belong to the user of this process"):
        CacheFolder(tmp_path, SIZE)


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"disk_cache .*/file"):
        CacheFolder(tmp_path / "file", SIZE)
