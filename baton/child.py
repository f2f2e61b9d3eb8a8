"""`python -m baton.child PARENT_PID CORE MODULE ARG...`: become `python -m MODULE ARG...`, tied to its parent.

The kernel ends the process when the parent dies, however it dies, and keeps it on one core unless CORE is `all`. Done
here, between fork and exec, because code that runs inside a fork of a threaded process must not allocate.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
ALL_CORES = "all"


def main() -> None:
    parent, core, module, *arguments = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent):
            sys.exit("the parent has ended")
        if core != ALL_CORES:
            os.sched_setaffinity(0, {int(core)})
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


if __name__ == "__main__":
    main()
