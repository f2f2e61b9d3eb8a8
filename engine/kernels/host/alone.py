"""One process of a host at a time."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_S = 0.02


@contextmanager
def alone(path: Path, *, patience_s: float) -> Iterator[bool]:
    """Hold a lock on the file while the block runs; whether it is held. Without it the block runs all the same: after
    `patience_s`, and where the file cannot be opened, which is never followed if it is a link."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        yield False
        return
    try:
        yield _locked(descriptor, time.monotonic() + patience_s)
    finally:
        os.close(descriptor)


def _locked(descriptor: int, deadline_s: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(POLL_S)
        except OSError:
            return False
        else:
            return True
