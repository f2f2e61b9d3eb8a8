"""The folder of a disk cache, which processes of any number of pools may share.

    DIR/baton-cache/4f/4f1c…/page.0-16.0of1      a block's objects, a file each

Each process bounds the folder: from time to time it adds up the sizes, and removes the blocks that
were not used for the longest time, each with all of its files. Only one user may read the folder.
"""

import errno
import logging
import os
import secrets
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pool.tiers.block_store import Content, ObjectKey, StagePart, parts_among
from pool.tiers.copies import ReportedCopies, TierCopies
from runtime.digests import NAME_BYTES
from runtime.errors import ConfigError

logger = logging.getLogger(__name__)

FOLDER = "baton-cache"
ABANDONED_S = 600.0  # seconds after which an unfinished file is that of a process that has ended
QUIET_S = 10.0  # seconds between two warnings, and between two removals from a full disk
CHECKS = 16  # sizes are added up whenever a process has written this part of the limit
FilePath = str | Path
_MAX_BUFFERS = 512  # of one system call; Linux allows 1024
_FULL = (errno.ENOSPC, errno.EDQUOT)
# Permissions of everyone but the user and the folder's group, to which Kubernetes gives all files
# of a volume (fsGroup). The group gets none from Baton.
_OTHERS = 0o007


@dataclass(frozen=True)
class _StoredBlock:
    used_s: float
    num_bytes: int
    path: str
    point: bytes  # the block's name if prompts can resume after it, otherwise empty


class CacheFolder:
    """A folder of blocks. Implements `BlockStore`."""

    def __init__(self, parent: Path, max_bytes: int, copies: TierCopies | None = None) -> None:
        """Create the folder in `parent` if it is missing. `copies` has what is there.

        Raises:
            ConfigError: it cannot be used, or other users may read it.
        """
        self._path = parent / FOLDER
        self.max_bytes = max_bytes
        self._copies = copies or ReportedCopies().of_tier()
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

    def path_of(self, key: ObjectKey) -> str:
        return f"{self._block(key.block)}/{key.label}"

    def parts(self, blocks: Sequence[bytes], content: Content) -> Iterator[Collection[StagePart]]:
        for block in blocks:
            try:
                yield parts_among(os.listdir(self._block(block)), content)
            except OSError:
                yield ()

    def get(self, key: ObjectKey, pieces: Sequence[memoryview]) -> int | None:
        try:
            return read_file(self.path_of(key), pieces)
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("a file of the disk cache cannot be read: %s", error)
            return 0

    def put(self, key: ObjectKey, pieces: Sequence[memoryview]) -> bool:
        try:
            self._prepare(key.block)
            write_file(self.path_of(key), pieces)
        except OSError as error:
            self._refused(error)
            return False
        self._copies.stored(key.block, key.content)
        self._written(sum(map(len, pieces)))
        return True

    def prefetch(self, key: ObjectKey) -> None:
        """Have the kernel begin to read a file, if it is there."""
        with suppress(OSError):
            descriptor = os.open(self.path_of(key), os.O_RDONLY | os.O_NOFOLLOW)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)

    def use(self, keys: Iterable[ObjectKey]) -> None:
        for key in keys:
            try:
                os.utime(self.path_of(key))
            except OSError:  # it is not there, or another process has removed it
                self._copies.removed(key.block, key.content)
            else:
                self._copies.stored(key.block, key.content)  # which another process may have done

    def remove(self, key: ObjectKey) -> None:
        self._copies.removed(key.block, key.content)
        try:
            os.unlink(self.path_of(key))
        except FileNotFoundError:
            pass  # another process has removed it
        except OSError as error:
            logger.warning("a damaged file stays in the disk cache: %s", error)

    def check(self) -> None:
        """Add up the files, and remove the oldest until there is room for what comes next."""
        self._check()

    def interrupt(self) -> None:
        """Do nothing: the kernel ends a call when the disk answers."""

    def close(self) -> None:
        """Do nothing: the files outlive the process."""

    def _check(self, *, is_full: bool = False) -> None:
        """Add up the files and remove some; if the disk `is_full`, their size may not grow."""
        self._num_written = 0
        blocks = sorted(self._blocks(), key=lambda block: block.used_s)
        num_bytes = sum(block.num_bytes for block in blocks)
        most = min(self.max_bytes, num_bytes) if is_full else self.max_bytes
        num_removed = 0
        for block in blocks:
            if num_bytes + most // CHECKS <= most:
                break
            num_bytes -= block.num_bytes
            num_removed += 1
            shutil.rmtree(block.path, ignore_errors=True)
        self.num_bytes = num_bytes
        self._copies.found([block.point for block in blocks[num_removed:] if block.point])

    def _prepare(self, block: bytes) -> None:
        """Create the folder of a block's files if it is missing.

        Raises:
            OSError: it cannot be created.
        """
        path = self._block(block)
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            pass
        except FileNotFoundError:
            os.makedirs(path, 0o700, exist_ok=True)

    def _written(self, num_bytes: int) -> None:
        """Note that a file was written; remove old ones if all of them exceed the limit."""
        self._num_written += num_bytes
        self.num_bytes += num_bytes
        if self._num_written * CHECKS >= self.max_bytes:
            self.check()

    def _refused(self, error: OSError) -> None:
        """Note that a file could not be written; remove old ones if the disk has no more room."""
        now_s = time.monotonic()
        if now_s < self._quiet_until_s:
            return
        self._quiet_until_s = now_s + QUIET_S
        logger.warning("blocks are not written to the disk cache: %s", error)
        if error.errno in _FULL:
            self._check(is_full=True)

    def _blocks(self) -> Iterator[_StoredBlock]:
        """Return the blocks, and remove what processes have left unfinished."""
        abandoned_s = time.time() - ABANDONED_S
        for folder, _, names in os.walk(self._path):
            used_s, num_bytes, point = 0.0, 0, b""
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
                if name.startswith(f"{self._copies.content}.") and not point:
                    point = _block_name(os.path.basename(folder))
            if names and Path(folder).parent.parent == self._path:
                yield _StoredBlock(used_s, num_bytes, folder, point)

    def _block(self, name: bytes) -> str:
        text = name.hex()
        return f"{self._path}/{text[:2]}/{text}"


def _block_name(text: str) -> bytes:
    """Return the name of the block whose folder has this name, empty if it is none."""
    try:
        name = bytes.fromhex(text)
    except ValueError:
        return b""
    return name if len(name) == NAME_BYTES else b""


def write_file(path: FilePath, pieces: Sequence[memoryview]) -> None:
    """Write a file that consists of the pieces, whole or not at all. Only its user may read it.

    Raises:
        OSError: it cannot be written.
    """
    folder, file_name = os.path.split(path)
    # Random, because processes in several containers have the same ids.
    temporary = f"{folder}/.{file_name}.{secrets.token_hex(8)}"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            _write_all(descriptor, pieces)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def read_file(path: FilePath, pieces: Sequence[memoryview]) -> int:
    """Read a file into the pieces if it has their size; return its own.

    Raises:
        OSError: it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        size = os.fstat(descriptor).st_size
        return _read_all(descriptor, pieces) if size == sum(map(len, pieces)) else size
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, pieces: Sequence[memoryview]) -> None:
    """Append the pieces to a file, with one system call if there are few.

    A buffered file would take one for each, which is most of the time.
    """
    for first in range(0, len(pieces), _MAX_BUFFERS):
        some = pieces[first : first + _MAX_BUFFERS]
        count = os.writev(descriptor, some)
        if count < sum(map(len, some)):
            # A call transfers at most 2 GiB, and less than that to a full disk.
            for piece in _unfilled(some, count):
                while len(piece):
                    piece = piece[os.write(descriptor, piece) :]


def _read_all(descriptor: int, pieces: Sequence[memoryview]) -> int:
    """Fill the pieces from the beginning of a file; return the number of bytes that it had."""
    done = 0
    for first in range(0, len(pieces), _MAX_BUFFERS):
        some = pieces[first : first + _MAX_BUFFERS]
        wanted = sum(map(len, some))
        count = os.preadv(descriptor, some, done)
        done += count
        if count < wanted:
            # A call transfers at most 2 GiB, and may be interrupted.
            for piece in _unfilled(some, count):
                while len(piece) and (count := os.preadv(descriptor, [piece], done)):
                    done += count
                    piece = piece[count:]
    return done


def _unfilled(pieces: Sequence[memoryview], done: int) -> list[memoryview]:
    """Return the pieces without their first `done` bytes."""
    rest = []
    for piece in pieces:
        taken = min(done, len(piece))
        done -= taken
        rest.append(piece[taken:])
    return rest
