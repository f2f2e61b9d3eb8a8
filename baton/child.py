"""`python -m baton.child PARENT_PID CORE MODULE ARG...`: become `python -m MODULE ARG...`, tied to
its parent.

This runs in a new interpreter, because code between fork and exec of a threaded process must not
allocate.
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
