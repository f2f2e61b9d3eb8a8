"""A process of ours: it imports nothing from where it was started, does not outlive its parent,
keeps to its cores."""

import ctypes
import os
import signal
import sys
from pathlib import Path

from runtime.errors import ConfigError

_PR_SET_PDEATHSIG = 1
ALL_CORES = "all"


def program(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of ours. A file of that name in the working directory is not
    taken for it, unless that is where we are ourselves: in a checkout that was not installed.
    Raises ConfigError where that directory was removed."""
    try:
        here = Path.cwd()
    except FileNotFoundError:
        raise ConfigError("the working directory is gone", field="working_directory") from None
    unless_ours = [] if here == Path(__file__).resolve().parents[2] else ["-P"]
    return [sys.executable, *unless_ours, "-m", module, *arguments]


def tie_to_parent(parent: int, core: str) -> None:
    """The kernel ends this process when `parent` dies, however that dies, and keeps it on `core`,
    or on several with commas between, unless that is `ALL_CORES`. Ends the process if the parent is
    gone already. Linux only; elsewhere nothing happens."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent has ended")
    if core != ALL_CORES:
        os.sched_setaffinity(0, map(int, core.split(",")))
