"""Compilation of kernels before their first call, shared with the other processes of this machine.

A process goes through the kernels that it will call. A kernel that another process is compiling is
postponed, so that processes that start together share the work. A process with several cores starts
helpers, because numba compiles one kernel at a time per process, whatever the number of threads.

    python -m engine.kernels.host.aot.precompile PARENT_PID 0,7,3     # a helper for these kernels
"""

import logging
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from engine.kernels.host.aot.kernel_list import Kernel, kernels
from engine.kernels.host.codegen.compiled import (
    Attempt,
    KernelLockedError,
    KernelMissingError,
    kept_in,
    trying,
)
from runtime.process.child_process import ALL_CORES, program, tie_to_parent
from runtime.process.host_cores import num_cores
from runtime.process.host_memory import MIB, host_memory
from runtime.process.start_progress import KERNELS

logger = logging.getLogger(__name__)

PROCESS_BYTES = 640 * MIB  # of a compiling process; half of it is torch and numba
_REAP_S = 5.0
REPORT_S = 2.0  # between two progress reports


def _log(done: int, total: int) -> None:
    logger.info(KERNELS, done, total)


def compile_ahead(wanted: Sequence[Kernel], report: Callable[[int, int], None] = _log) -> None:
    """Compile or load kernels, and return when all are available.

    Call it from the process's main thread: helper processes end with the thread that starts them.
    `report` receives the number of available kernels and the total, counting only kernels that were
    never compiled on this machine.
    """
    begin_s = time.monotonic()
    missing, left = _not_kept(wanted)
    are_kept = not missing or kept_in() is not None
    if not are_kept:
        logger.warning(
            "compiled kernels cannot be kept, so every start compiles them: neither the installed source "
            "nor the user's cache folder can be written; NUMBA_CACHE_DIR names another folder"
        )
    progress = _ProgressReporter(len(missing), report)
    most = (
        min(num_cores(), len(missing), host_memory().available_bytes // PROCESS_BYTES)
        if are_kept
        else 1
    )
    with _helpers(missing, most - 1):
        while left:
            locked = _take(left, progress)
            if len(locked) == len(left):  # other processes have locked all that is left
                locked.pop(0).load()
            left = locked
    if missing:
        report(len(missing), len(missing))
        logger.info(
            "all %d kernels are there after %.1f s", len(wanted), time.monotonic() - begin_s
        )


class _ProgressReporter:
    """Progress reports, `REPORT_S` apart from the first one on; none if all were cached."""

    def __init__(self, total: int, report: Callable[[int, int], None]) -> None:
        self._total = total
        self._report = report
        self._reported_s = -math.inf
        self.left(total)

    def left(self, count: int) -> None:
        """Record the number of kernels that are not available yet."""
        now_s = time.monotonic()
        if self._total and now_s - self._reported_s >= REPORT_S:
            self._reported_s = now_s
            self._report(max(self._total - count, 0), self._total)


def _not_kept(wanted: Sequence[Kernel]) -> tuple[list[Kernel], list[Kernel]]:
    """Load the cached kernels.

    Return the missing ones, and the missing ones together with those locked by others.
    """
    missing = []
    left = []
    for kernel in wanted:
        try:
            with trying(Attempt.LOAD):
                kernel.load()
        except KernelMissingError:
            missing.append(kernel)
            left.append(kernel)
        except KernelLockedError:
            left.append(kernel)
    return missing, left


def _take(left: Sequence[Kernel], progress: _ProgressReporter) -> list[Kernel]:
    """Compile or load all kernels that no other process has locked; return the others."""
    locked = []
    for place, kernel in enumerate(left, 1):
        if not _took(kernel):
            locked.append(kernel)
        progress.left(len(locked) + len(left) - place)
    return locked


def _took(kernel: Kernel) -> bool:
    """Compile or load a kernel; return False if another process has locked it."""
    try:
        with trying(Attempt.UNLOCKED):
            kernel.load()
    except KernelLockedError:
        return False
    return True


@contextmanager
def _helpers(missing: list[Kernel], count: int) -> Iterator[None]:
    """Run helper processes for the same kernels during the block.

    Each begins with a different kernel, and none outlives the block.
    """
    helpers: list[subprocess.Popen[bytes]] = []
    try:
        for first in range(1, count + 1):
            order = _places(missing[first:] + missing[:first])
            helpers.append(
                subprocess.Popen(
                    program(__name__, str(os.getpid()), order),
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            )
        yield
    finally:
        for helper in helpers:
            helper.kill()
        for helper in helpers:
            helper.wait(_REAP_S)


def _places(wanted: Sequence[Kernel]) -> str:
    """Return the kernels in the format of `main`'s argument."""
    every = list(kernels())
    return ",".join(str(every.index(kernel)) for kernel in wanted)


def main() -> None:
    """Run a helper; see `_helpers`."""
    parent, places = sys.argv[1:]
    tie_to_parent(int(parent), ALL_CORES)
    every = list(kernels())
    for place in places.split(","):
        _took(every[int(place)])


if __name__ == "__main__":
    main()
