"""How every benchmark reports: one JSON object on stdout with --json, aligned lines for people otherwise."""

import contextlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

Value = int | float | str | bool | None


@dataclass(frozen=True)
class Environment:
    """What a figure cannot be compared without."""

    python: str
    machine: str
    cpu: str
    num_cores: int


def environment() -> Environment:
    return Environment(platform.python_version(), platform.machine(), _cpu_name(), len(os.sched_getaffinity(0)))


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def busy_s() -> float:
    """CPU time all processes have used so far."""
    user, nice, system, _, _, irq, soft_irq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + soft_irq + steal) / os.sysconf("SC_CLK_TCK")


def process_cpu_s(pid: int) -> float:
    """CPU time a process has used so far, without its children."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def family_cpu_s() -> float:
    """CPU time of this process and of all that it started, directly or not, and that still run."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parents[int(entry.name)] = int(_stat(int(entry.name))[1])
    family, found = set[int](), {os.getpid()}
    while found:
        family |= found
        found = {pid for pid, parent in parents.items() if parent in found} - family
    total = 0.0
    for pid in family:
        with contextlib.suppress(OSError):
            total += process_cpu_s(pid)
    return total


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third, the state, on; the second may contain blanks."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def foreign_cpu_s() -> float:
    """CPU seconds of the machine less those of this process and of its children that have ended."""
    own = os.times()
    return busy_s() - (own.user + own.system + own.children_user + own.children_system)


def render(name: str, values: Mapping[str, Value], *, as_json: bool) -> str:
    """The report of one benchmark run; JSON adds the environment."""
    if as_json:
        return json.dumps({"bench": name, **values, "environment": asdict(environment())})
    width = max(map(len, values))
    return "\n".join([name, *(f"  {key:<{width}}  {_spelled(value)}" for key, value in values.items())])


def _spelled(value: Value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
