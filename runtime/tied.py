"""A process that does not outlive its parent, and keeps to one core."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
ALL_CORES = "all"


def tie_to_parent(parent: int, core: str) -> None:
    """The kernel ends this process when `parent` dies, however that dies, and keeps it on one core unless `core` is
    `ALL_CORES`. Ends the process if the parent is gone already. Linux only; elsewhere nothing happens."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent has ended")
    if core != ALL_CORES:
        os.sched_setaffinity(0, {int(core)})
