"""Values made of files, made again when the files change: certificates and tokens, rotated under a
running process.

tokens = Watched({"token_file": path}, make=parse)       # reads now; ConfigError names the setting
tokens.current()                                         # the value of the files as they are now
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
_ATTEMPTS = 5  # to read files that are being replaced while we read
_GRAIN_NS = (
    50_000_000  # a file that changes twice within a tick of its file system's clock looks the same
)

logger = logging.getLogger(__name__)


class Watched(Generic[T]):
    """`files` maps the setting that names a file to its path; `make` gets their contents by setting
    and raises ConfigError for those that do not work. `current` may be called from any thread; it
    costs one stat per file, and one reading more while they were written just before they were
    read."""

    def __init__(self, files: Mapping[str, Path], make: Callable[[Contents], T]) -> None:
        self._files = dict(files)
        self._make = make
        self._lock = threading.Lock()
        self._seen: Contents = {}
        self._seen_at_ns = 0
        self._stamp, self._value = self._read()

    def current(self) -> T:
        """Never raises: files that cannot be used (half of a pair replaced, for example) are logged
        once, and the last value that could be stays in use."""
        with self._lock:
            stamp = self._look()
            if stamp != self._stamp or self._has_changed_unseen():
                self._stamp = stamp
                try:
                    self._stamp, self._value = self._read()
                    logger.info(
                        "files were replaced and are in use",
                        extra={"settings": " ".join(self._files)},
                    )
                except ConfigError as error:
                    logger.warning(
                        "files were replaced but cannot be used, the old ones stay in use: %s",
                        error,
                    )
            return self._value

    def _look(self) -> _Stamp:
        """What a replaced file differs in; None for one that is not there. Follows links, as
        Kubernetes swaps those."""
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
        """The value of one state of all files, and its stamp. Raises ConfigError."""
        before = self._look()
        for _ in range(_ATTEMPTS):
            contents = self._see()
            problem, made = None, None
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
