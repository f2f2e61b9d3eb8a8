"""The folder of a disk cache, which processes of any number of pools may share.

    DIR/baton-cache/4f/4f1c…/page.0-16.0of1      a block's files, one for each part of a stage

Each process bounds the folder: from time to time it adds up the sizes, and removes the blocks that
were not used for the longest time, each with all of its files. Only one user may read the folder.
"""

import errno
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pool.disk.part_file import Content, StagePart
from runtime.errors import ConfigError
from runtime.process.host_memory import MIB

logger = logging.getLogger(__name__)

FOLDER = "baton-cache"
ABANDONED_S = 600.0  # seconds after which an unfinished file is that of a process that has ended
QUIET_S = 10.0  # seconds between two warnings, and between two removals from a full disk
CHECKS = 16  # sizes are added up whenever a process has written this part of the limit
_FULL = (errno.ENOSPC, errno.EDQUOT)
# Permissions of everyone but the user and the folder's group, to which Kubernetes gives all files
# of a volume (fsGroup). The group gets none from Baton.
_OTHERS = 0o007


@dataclass(frozen=True)
class _StoredBlock:
    used_s: float
    num_bytes: int
    path: str


class CacheFolder:
    """A folder of blocks. Belongs to the thread that writes, except for what it reads."""

    def __init__(self, parent: Path, max_bytes: int) -> None:
        """Create the folder in `parent` if it is missing.

        Raises:
            ConfigError: it cannot be used, or other users may read it.
        """
        self._path = parent / FOLDER
        self.max_bytes = max_bytes
        self.num_bytes = 0  # of all files when they were last added up, and of later own ones
        self._num_written = max_bytes  # bytes since then; it begins with a check
        self._quiet_until_s = 0.0  # time until which no error is logged
        try:
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self._path.stat()
            is_writable = os.access(self._path, os.W_OK | os.X_OK)
        except OSError as error:
            raise ConfigError(f"disk_cache {parent}: {error}", field="disk_cache") from error
        if found.st_uid != os.getuid() or found.st_mode & _OTHERS or not is_writable:
            raise ConfigError(
                f"disk_cache {self._path} must belong to the user of this process, writable, and be "
                f"closed to others (mode 0700 or 0770)",
                field="disk_cache",
            )

    def path_of(self, name: bytes, content: Content, part: StagePart) -> str:
        return f"{self._block(name)}/{content}.{part}"

    def has(self, name: bytes, content: Content, part: StagePart) -> bool:
        """Return whether the file of this part is there. Any thread."""
        return os.path.exists(self.path_of(name, content, part))

    def parts(self, name: bytes, content: Content) -> list[StagePart]:
        """Return the parts of a block that are there. Any thread."""
        try:
            files = os.listdir(self._block(name))
        except OSError:
            return []
        prefix = f"{content}."
        parts = (
            StagePart.parse(file.removeprefix(prefix)) for file in files if file.startswith(prefix)
        )
        return [part for part in parts if part is not None]

    def prepare(self, name: bytes) -> bool:
        """Create the folder of a block's files if it is missing; return whether it was.

        Raises:
            OSError: it cannot be created.
        """
        path = self._block(name)
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            return False
        except FileNotFoundError:
            os.makedirs(path, 0o700, exist_ok=True)
        return True

    def use(self, paths: Iterable[str]) -> None:
        """Note that files were used, in this order. Any thread."""
        for path in paths:
            try:
                os.utime(path)
            except OSError:
                continue  # another process has removed it

    def remove(self, path: str) -> None:
        """Remove a damaged file. Any thread."""
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass  # another process has removed it
        except OSError as error:
            logger.warning("a damaged file stays in the disk cache: %s", error)

    def written(self, num_bytes: int) -> None:
        """Note that a file was written; remove old ones if all of them exceed the limit."""
        self._num_written += num_bytes
        self.num_bytes += num_bytes
        if self._num_written * CHECKS >= self.max_bytes:
            self.check()

    def refused(self, error: OSError) -> None:
        """Note that a file could not be written; remove old ones if the disk has no more room."""
        now_s = time.monotonic()
        if now_s < self._quiet_until_s:
            return
        self._quiet_until_s = now_s + QUIET_S
        logger.warning("blocks are not written to the disk cache: %s", error)
        if error.errno in _FULL:
            self.check(is_full=True)

    def check(self, *, is_full: bool = False) -> None:
        """Add up the files, and remove the oldest until there is room for what comes next.

        If the disk `is_full`, the folder may have no more bytes than it has.
        """
        self._num_written = 0
        blocks = sorted(self._blocks(), key=lambda block: block.used_s)
        num_bytes = sum(block.num_bytes for block in blocks)
        most = min(self.max_bytes, num_bytes) if is_full else self.max_bytes
        for block in blocks:
            if num_bytes + most // CHECKS <= most:
                break
            num_bytes -= block.num_bytes
            shutil.rmtree(block.path, ignore_errors=True)
        self.num_bytes = num_bytes

    def _blocks(self) -> Iterator[_StoredBlock]:
        """Return the blocks, and remove what processes have left unfinished."""
        abandoned_s = time.time() - ABANDONED_S
        for folder, _, names in os.walk(self._path):
            used_s, num_bytes = 0.0, 0
            for name in names:
                path = os.path.join(folder, name)
                try:
                    found = os.stat(path, follow_symlinks=False)
                    if name.startswith(".") and found.st_mtime < abandoned_s:
                        os.unlink(path)
                        continue
                except OSError:
                    continue  # another process has removed it
                used_s, num_bytes = max(used_s, found.st_mtime), num_bytes + found.st_size
            if names and Path(folder).parent.parent == self._path:
                yield _StoredBlock(used_s, num_bytes, folder)

    def _block(self, name: bytes) -> str:
        text = name.hex()
        return f"{self._path}/{text[:2]}/{text}"


def folder_of(parent: Path, megabytes: int) -> CacheFolder:
    """Return the folder of `--disk-cache` and `--disk-cache-mb`; raise ConfigError as it does."""
    return CacheFolder(parent, megabytes * MIB)
