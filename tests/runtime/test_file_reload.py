"""Files that change under a running process."""

import logging
import os
import time
from pathlib import Path

import pytest

from runtime.errors import ConfigError
from runtime.security.file_reload import Contents, Watched


def word(contents: Contents) -> str:
    if contents["file"] == b"bad":
        raise ConfigError("bad", field="file")
    return contents["file"].decode()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_text("one")
    return path


def test_a_file_that_was_not_touched_gives_the_same_object(path: Path) -> None:
    watched = Watched({"file": path}, lambda contents: [word(contents)])
    assert watched.current() is watched.current()


def test_a_change_within_a_tick_of_the_file_systems_clock_is_seen(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tick_ns = time.time_ns() + 10**10  # long enough for any machine to be within it
    os.utime(path, ns=(tick_ns, tick_ns))
    watched = Watched({"file": path}, word)
    for text, expected in (("two", "two"), ("bad", "two"), ("six", "six")):
        path.write_text(text)
        os.utime(path, ns=(tick_ns, tick_ns))
        assert (watched.current(), watched.current()) == (expected, expected)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.levelno for record in warnings if record.name.startswith("runtime.")] == [
        logging.WARNING
    ]
