"""Progress of kernel compilation in a starting process: its log line, and how supervisors parse it."""

import re

from runtime.observe.log import message_of

KERNELS = "compiling kernels: %d of %d"  # message of the log line
_KERNELS = re.compile("compiling kernels: ([0-9]+ of [0-9]+)")


def kernel_progress(line: str) -> str:
    """Return the progress that a log line reports, such as "compiles kernels (3 of 37)", or ""."""
    found = _KERNELS.search(message_of(line))
    return f"compiles kernels ({found[1]})" if found else ""
