"""Progress of a starting process: its log lines, and how supervisors parse them."""

import re

from runtime.observe.log import message_of

# messages of the log lines
KERNELS = "compiling kernels: %d of %d"
WEIGHTS = "loading weights: %d of %d MiB"
_LINES = {
    re.compile("compiling kernels: ([0-9]+ of [0-9]+)"): "compiles kernels",
    re.compile("loading weights: ([0-9]+ of [0-9]+ MiB)"): "loads weights",
}


def start_progress(line: str) -> str:
    """Return the progress that a log line reports, such as "compiles kernels (3 of 37)", or ""."""
    message = message_of(line)
    for pattern, doing in _LINES.items():
        if found := pattern.search(message):
            return f"{doing} ({found[1]})"
    return ""
