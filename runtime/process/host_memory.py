"""Memory that a process may use on the machine or in its container.

A container is limited by its control group and by every group above it. Both control group versions
are supported.
"""

import errno
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
# Texts of allocation errors, including torch's for host and device. Torch raises plain
# RuntimeErrors, which only their text identifies.
_SAID = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "failed to map segment",
)


@dataclass(frozen=True)
class HostMemory:
    """Memory in bytes.

    `total_bytes` is constant and the same for all processes of a machine or container. `is_limited`
    is set if a container's limit is below the machine's memory.
    """

    total_bytes: int
    available_bytes: int
    is_limited: bool = False


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Return the memory of the machine at `root`, reduced to the limits of this process's groups."""
    machine, available = _machine(root)
    total = machine
    for limit, used in _limits(root):
        total = min(total, limit)
        available = min(available, max(0, limit - used))
    return HostMemory(total, available, is_limited=total < machine)


def memory_left() -> str:
    """Describe the memory that this process could still allocate, for the errors that end it."""
    found = host_memory()
    (limit, _) = resource.getrlimit(resource.RLIMIT_AS)
    of_process = (
        ""
        if limit == resource.RLIM_INFINITY
        else f", of which ulimit -v lets a process have {limit // MIB}"
    )
    return f"{found.available_bytes // MIB} of {found.total_bytes // MIB} MiB are free{of_process}"


def num_oom_kills(root: Path = Path("/")) -> int:
    """Return the number of processes that the kernel's OOM killer has ended since boot.

    Returns 0 if the kernel does not report it.
    """
    return _stated(root / "proc/vmstat", "oom_kill")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` reports that host or device memory ran out."""
    if isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno == errno.ENOMEM
    ):
        return True
    said = str(error).lower()
    return isinstance(error, RuntimeError | ImportError | OSError) and any(
        words in said for words in _SAID
    )


def _machine(root: Path) -> tuple[int, int]:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total
    fields = {
        name: int(rest.split()[0]) << 10
        for name, _, rest in (line.partition(":") for line in lines)
    }
    return fields["MemTotal"], fields["MemAvailable"]


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, used) in bytes of every group that has a limit. Clean file pages count as free."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            top = mount / "memory"
        elif not controllers:
            names = ("memory.max", "memory.current", "inactive_file")
            top = mount
        else:
            continue
        # A container sees its own group as the root of the mount, whatever its path on the host.
        group = Path(path.lstrip("/"))
        for folder in (top / part for part in (group, *group.parents)):
            limit = _number(folder / names[0])
            used = _number(folder / names[1])
            if limit is not None and used is not None:
                yield limit, used - _stated(folder / "memory.stat", names[2])


def _number(file: Path) -> int | None:
    """Return the number in the file, or None if it does not exist or contains "max"."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _stated(file: Path, name: str) -> int:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return next(
        (int(value) for key, _, value in (line.partition(" ") for line in lines) if key == name), 0
    )
