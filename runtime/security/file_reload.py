"""Values from files that are reloaded when the files change, such as certificates and tokens.

tokens = Watched({"token_file": path}, make=parse)       # reads now; ConfigError names the setting
tokens.current()                                         # the value of the current files
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from runtime.errors import ConfigError

T = TypeVar("T")
Contents = Mapping[str, bytes]
_Stamp = tuple[tuple[int, int, int] | None, ...]
_ATTEMPTS = 5  # attempts to read files that are being replaced at the same time
# A file that changes twice within a clock tick of its file system has the same time stamp.
_GRAIN_NS = 50_000_000

logger = logging.getLogger(__name__)


class Watched(Generic[T]):
    """Value made from files, which `current` reloads when they change. Thread-safe.

    `files` maps a setting to the path that it names. `make` gets the contents by setting, and
    raises ConfigError if they are invalid. `current` takes one stat per file. It also reads the
    files if they were written just before the last read.
    """

    def __init__(self, files: Mapping[str, Path], make: Callable[[Contents], T]) -> None:
        self._files = dict(files)
        self._make = make
        self._lock = threading.Lock()
        self._seen: Contents = {}
        self._seen_at_ns = 0
        self._stamp, self._value = self._read()

    def current(self) -> T:
        """Return the value of the current files. Never raises.

        Invalid files, such as a half-replaced pair, are logged once, and the last valid value stays
        in use.
        """
        with self._lock:
            stamp = self._look()
            if stamp != self._stamp or self._has_changed_unseen():
                self._stamp = stamp
                try:
                    self._stamp, self._value = self._read()
                    logger.info(
                        "reloaded replaced files",
                        extra={"settings": " ".join(self._files)},
                    )
                except ConfigError as error:
                    logger.warning(
                        "replaced files are invalid, the previous ones stay in use: %s",
                        error,
                    )
            return self._value

    def _look(self) -> _Stamp:
        """Return a stamp per file that a replacement changes, or None for a missing file.

        Follows links, because Kubernetes replaces those.
        """
        return tuple(map(_stamp_of, self._files.values()))

    def _has_changed_unseen(self) -> bool:
        if all(stamp is None or stamp[2] < self._seen_at_ns - _GRAIN_NS for stamp in self._stamp):
            return False
        seen = self._seen
        with suppress(ConfigError):
            self._see()
        return self._seen != seen

    def _see(self) -> Contents:
        self._seen, self._seen_at_ns = {}, time.time_ns()
        self._seen = {setting: _contents_of(setting, path) for setting, path in self._files.items()}
        return self._seen

    def _read(self) -> tuple[_Stamp, T]:
        """Return the value of one consistent state of all files, and its stamp. Raises ConfigError."""
        before = self._look()
        for _ in range(_ATTEMPTS):
            contents = self._see()
            problem = None
            made = None
            try:
                made = (self._make(contents),)
            except ConfigError as error:
                problem = error
            after = self._look()
            if made is not None and before == after:
                return after, made[0]
            if problem is not None and before == after:
                raise problem
            before = after
        raise ConfigError(
            f"{', '.join(map(str, self._files.values()))} change faster than they can be read",
            field=next(iter(self._files)),
        )


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _contents_of(setting: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{setting}: cannot read {path}: {error.strerror}", field=setting
        ) from error
