"""Locks between the processes of a host."""

import fcntl
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runtime.clock import Deadline, SystemClock

POLL_S = 0.02
# struct flock: type, whence, start, length, process (0 for a lock of the open file)
_FLOCK = "hhqqi0q"


@contextmanager
def alone(path: Path, subject: int, *, timeout_s: float) -> Iterator[bool]:
    """Hold the lock of this subject, 0 to 2^63 - 1, on the file during the block.

    Yield whether it is held. The block runs without the lock after `timeout_s`, or if the file
    cannot be opened. Symbolic links are not followed.
    """
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        yield False
        return
    try:
        yield _locked(descriptor, subject, Deadline.after(SystemClock(), timeout_s))
    finally:
        os.close(descriptor)


def _locked(descriptor: int, subject: int, deadline: Deadline) -> bool:
    """Lock one byte of the file, which need not exist."""
    wanted = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, subject, 1, 0)
    while True:
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, wanted)
        except BlockingIOError:
            if deadline.is_over:
                return False
            time.sleep(POLL_S)
        except OSError:
            return False
        else:
            return True
