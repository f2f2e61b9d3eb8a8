"""Number of cores that a process may use: its CPU affinity, limited by its container's quota."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path


def num_cores(root: Path = Path("/")) -> int:
    """Return the number of usable cores, at least 1. Fractional quotas are rounded down."""
    own = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, int(min([own, *_quotas(root)])))


def _quotas(root: Path) -> Iterator[float]:
    """Yield the quota, in cores, of every control group (v1 and v2) that limits this process."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = mount / "cpu" if controllers else mount
        # A container sees its own group as the root of the mount, whatever its path on the host.
        group = Path(path.lstrip("/"))
        for folder in (top / part for part in (group, *group.parents)):
            files = (
                [folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"]
                if controllers
                else [folder / "cpu.max"]
            )
            try:
                quota, period = " ".join(file.read_text() for file in files).split()
                if int(quota) > 0 and int(period) > 0:
                    yield int(quota) / int(period)
            except (OSError, ValueError):  # no such file, or the word "max"
                continue
