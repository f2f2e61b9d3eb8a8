"""How far a starting process is with its kernels, as its log says it and its supervisor reads
it."""

import re

from runtime.observe.log import message_of

KERNELS = "compiling kernels: %d of %d"  # the message of the log
_KERNELS = re.compile("compiling kernels: ([0-9]+ of [0-9]+)")


def kernel_progress(line: str) -> str:
    """Return what a line of the log says of it, like "compiles kernels (3 of 37)"; empty where it
    is about something else."""
    found = _KERNELS.search(message_of(line))
    return f"compiles kernels ({found[1]})" if found else ""
