"""Compile kernels before they are called, side by side with whoever else compiles on this machine.

A process goes through the kernels that it will call. One that another process compiles is left for later, so that those
who start together share the work. A process with several cores starts others beside it: numba compiles one kernel at a
time in a process, whatever its threads.

    python -m engine.kernels.host.ahead PARENT_PID 0,7,3     # such another: of all kernels, these
"""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from engine.kernels.host.compiled import Attempt, KernelLockedError, KernelMissingError, trying
from engine.kernels.host.kernel_list import Kernel, kernels
from runtime.host_cores import num_cores
from runtime.host_memory import MIB, host_memory
from runtime.tied import ALL_CORES, program, tie_to_parent

logger = logging.getLogger(__name__)

PROCESS_BYTES = 640 * MIB  # of a process that compiles: half of it are torch and numba
_REAP_S = 5.0


def compile_ahead(wanted: Sequence[Kernel]) -> None:
    """Returns when all are there. From the thread that the process ends with: what is started ends with it, too."""
    begin_s = time.monotonic()
    missing, left = _not_kept(wanted)
    if missing:
        logger.info("compiling kernels: %d of %d were never compiled on this machine", len(missing), len(wanted))
    most = min(num_cores(), len(missing), host_memory().available_bytes // PROCESS_BYTES)
    with _helpers(missing, most - 1):
        while left:
            locked = _take(left)
            if len(locked) == len(left):  # others have all that is left
                locked.pop(0).load()
            left = locked
    if missing:
        logger.info("all %d kernels are there after %.1f s", len(wanted), time.monotonic() - begin_s)


def _not_kept(wanted: Sequence[Kernel]) -> tuple[list[Kernel], list[Kernel]]:
    """Load what is kept. Returns what is missing, and that with what others have locked, to load or to compile it."""
    missing, left = [], []
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


def _take(left: Sequence[Kernel]) -> list[Kernel]:
    """Compile, or load, all that no other process has locked; returns the others."""
    locked = []
    for kernel in left:
        try:
            with trying(Attempt.UNLOCKED):
                kernel.load()
        except KernelLockedError:
            locked.append(kernel)
    return locked


@contextmanager
def _helpers(missing: list[Kernel], count: int) -> Iterator[None]:
    """Others that take of the same kernels while the block runs. Each begins with another one; none outlives it."""
    helpers: list[subprocess.Popen[bytes]] = []
    try:
        for first in range(1, count + 1):
            order = _places(missing[first:] + missing[:first])
            helpers.append(subprocess.Popen(program(__name__, str(os.getpid()), order), stdin=subprocess.DEVNULL,
                                            start_new_session=True))
        yield
    finally:
        for helper in helpers:
            helper.kill()
        for helper in helpers:
            helper.wait(_REAP_S)


def _places(wanted: Sequence[Kernel]) -> str:
    """As `main` reads them."""
    every = list(kernels())
    return ",".join(str(every.index(kernel)) for kernel in wanted)


def main() -> None:
    """What a helper does; see `_helpers`."""
    parent, places = sys.argv[1:]
    tie_to_parent(int(parent), ALL_CORES)
    every = list(kernels())
    _take([every[int(place)] for place in places.split(",")])


if __name__ == "__main__":
    main()
