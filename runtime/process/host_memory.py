"""How much memory a process may use: of the machine, or of the container it runs in.

A container's limit is that of its control group and of every group above it; both generations of
control groups are read, where the kernel shows them.
"""

import errno
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
# What allocators say, torch's of host and device among them: its errors are RuntimeErrors, known by
# their text alone.
_SAID = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "failed to map segment",
)


@dataclass(frozen=True)
class HostMemory:
    """In bytes. `total_bytes` is the same for all processes of a machine or container, and does not
    change. `is_limited`: it is a container's, below the machine's."""

    total_bytes: int
    available_bytes: int
    is_limited: bool = False


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Of the machine below `root`, lowered to what the control groups of this process leave."""
    machine, available = _machine(root)
    total = machine
    for limit, used in _limits(root):
        total, available = min(total, limit), min(available, max(0, limit - used))
    return HostMemory(total, available, is_limited=total < machine)


def memory_left() -> str:
    """Return how much memory this process could still take, in words, for the errors that end
    it."""
    found, (limit, _) = host_memory(), resource.getrlimit(resource.RLIMIT_AS)
    of_process = (
        ""
        if limit == resource.RLIM_INFINITY
        else f", of which ulimit -v lets a process have {limit // MIB}"
    )
    return f"{found.available_bytes // MIB} of {found.total_bytes // MIB} MiB are free{of_process}"


def num_oom_kills(root: Path = Path("/")) -> int:
    """Return how many processes the kernel has killed for want of memory since it started; 0 where
    it does not say."""
    return _stated(root / "proc/vmstat", "oom_kill")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` says that memory, of the host or of a device, ran out."""
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
    """(limit, used) of every group that has a limit, in bytes. Files that were only read count as
    free."""
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
            names, top = ("memory.max", "memory.current", "inactive_file"), mount
        else:
            continue
        # A container sees its own group as the top of the mount, whatever path the host has for it.
        group = Path(path.lstrip("/"))
        for folder in (top / part for part in (group, *group.parents)):
            limit, used = _number(folder / names[0]), _number(folder / names[1])
            if limit is not None and used is not None:
                yield limit, used - _stated(folder / "memory.stat", names[2])


def _number(file: Path) -> int | None:
    """None for a file that is not there, and for the word "max"."""
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
