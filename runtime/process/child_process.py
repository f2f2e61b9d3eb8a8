"""Setup of child processes: isolated import path, end with the parent, CPU affinity."""

import ctypes
import os
import signal
import sys
from pathlib import Path

from runtime.errors import ConfigError

_PR_SET_PDEATHSIG = 1
ALL_CORES = "all"


def program(module: str, *arguments: str) -> list[str]:
    """Return the command that runs one of Baton's modules.

    A module of that name in the working directory does not shadow it, unless the working directory
    is the checkout itself. Raises ConfigError if the working directory was removed.
    """
    try:
        here = Path.cwd()
    except FileNotFoundError:
        raise ConfigError("the working directory is gone", field="working_directory") from None
    unless_ours = [] if here == Path(__file__).resolve().parents[2] else ["-P"]
    return [sys.executable, *unless_ours, "-m", module, *arguments]


def tie_to_parent(parent: int, core: str) -> None:
    """Make the kernel kill this process when `parent` dies, and keep it on `core`.

    `core` is one core, several separated by commas, or `ALL_CORES`. Exits if the parent has already
    died. Does nothing outside Linux.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent has ended")
    if core != ALL_CORES:
        os.sched_setaffinity(0, map(int, core.split(",")))
