"""A file descriptor that another thread can make readable, coalescing calls while the owner is awake."""

import contextlib
import os
import select
import threading


class Wakeup:
    """An eventfd for `poll`. `set` may be called from any thread, everything else by the owner."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_set = False
        # The flag and the descriptor change together: were the flag down and the descriptor readable, every `sleep`
        # would return at once, for ever. And `set` never writes to a descriptor that was closed and reused.
        self._lock = threading.Lock()
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    @property
    def is_set(self) -> bool:
        return self._is_set

    def watch(self, fd: int) -> None:
        """Let `wait` also return when this descriptor is readable."""
        self._poll.register(fd, select.POLLIN)

    def set(self) -> None:
        # Only the first call since the last `clear` pays for a system call. The owner clears first and looks at its
        # queues after, so no call is lost; at worst one `wait` returns for nothing.
        if self._is_set:
            return
        with self._lock:
            if self._fd >= 0:
                self._is_set = True
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):
            self._is_set = False
            os.eventfd_read(self._fd)

    def sleep(self, timeout_s: float) -> None:
        """Until set, a watched descriptor is readable or the time is up."""
        self._poll.poll(max(0.0, timeout_s) * 1000)

    def wait(self, timeout_s: float) -> None:
        """Sleep, then clear."""
        self.sleep(timeout_s)
        self.clear()

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1
