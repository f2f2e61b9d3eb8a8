"""`python -m baton.child PARENT_PID CORE MODULE ARG...`: become `python -m MODULE ARG...`, tied to
its parent.

Done here, between fork and exec, because code that runs inside a fork of a threaded process must
not allocate.
"""

import os
import sys

from runtime.process.child_process import program, tie_to_parent


def main() -> None:
    parent, core, module, *arguments = sys.argv[1:]
    tie_to_parent(int(parent), core)
    os.execv(sys.executable, program(module, *arguments))


if __name__ == "__main__":
    main()
