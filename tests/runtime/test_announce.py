import os
from pathlib import Path

import pytest

from runtime.errors import ConfigError
from runtime.process.announce import Announcement, read_announcement, write_announcement


def test_round_trip_leaves_one_file(tmp_path: Path) -> None:
    path = tmp_path / "decode-0.json"
    assert read_announcement(path) is None
    said = Announcement(address="127.0.0.1:7", metrics_port=None, pid=3, incarnation="a")
    write_announcement(path, said)
    assert read_announcement(path) == said
    assert list(tmp_path.iterdir()) == [path]


def test_another_file_and_a_missing_folder_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"pid": 1}')
    with pytest.raises(ConfigError, match=r"x\.json"):
        read_announcement(path)
    with pytest.raises(ConfigError, match="absent"):
        write_announcement(tmp_path / "absent" / "x", Announcement("a:1", None, 1, ""))


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    taken = tmp_path / "folder"
    taken.mkdir()
    with pytest.raises(ConfigError, match="directory"):
        write_announcement(taken, Announcement("a:1", None, 1, ""))
    assert list(tmp_path.iterdir()) == [taken]


def test_a_device_or_pipe_is_never_replaced(tmp_path: Path) -> None:
    """`--announce /dev/null`, by root, took that device from the whole machine."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="pipe: it is not a regular file"):
        write_announcement(pipe, Announcement("a:1", None, 1, ""))
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]
