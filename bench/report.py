"""Report of every benchmark: one JSON object on stdout with --json, otherwise aligned lines."""

import contextlib
import json
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")

Value = int | float | str | bool | None


@dataclass(frozen=True)
class Environment:
    """Environment that a figure depends on."""

    python: str
    machine: str
    cpu: str
    num_cores: int


def environment() -> Environment:
    return Environment(
        platform.python_version(), platform.machine(), _cpu_name(), len(os.sched_getaffinity(0))
    )


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        "unknown",
    )


class OtherLoad:
    """Core use of other processes since this object was made.

    `foreign_cores` is that of other processes, `stolen_cores` that of a virtual machine's host.
    Above 0.2 of either, figures are noise.
    """

    def __init__(self) -> None:
        self._began_s, self._before = time.monotonic(), _cpu_times()

    def figures(self) -> dict[str, Value]:
        seconds = time.monotonic() - self._began_s
        busy, stolen, own = (
            now - before for now, before in zip(_cpu_times(), self._before, strict=True)
        )
        return {
            "foreign_cores": round((busy - own) / seconds, 2),
            "stolen_cores": round(stolen / seconds, 2),
        }


def _cpu_times() -> tuple[float, float, float]:
    """Return the seconds so far of all processes, of the host, and of this process and its
    descendants."""
    user, nice, system, _, _, irq, soft_irq, steal = map(
        int, Path("/proc/stat").read_text().split()[1:9]
    )
    busy = user + nice + system + irq + soft_irq
    return busy / TICKS_PER_S, steal / TICKS_PER_S, _family_cpu_s()


def process_cpu_s(pid: int) -> float:
    """Return the CPU time a process has used so far, without its children."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def _family_cpu_s() -> float:
    """Return the CPU time of this process and all its descendants, including ended ones."""
    members = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            members[int(entry.name)] = _stat(int(entry.name))
    family = set[int]()
    found = {os.getpid()}
    while found:
        family |= found
        found = {pid for pid, fields in members.items() if int(fields[1]) in found} - family
    return sum(int(field) for pid in family for field in members[pid][11:15]) / TICKS_PER_S


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third (the state); the second may contain
    blanks."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def render(name: str, values: Mapping[str, Value], *, as_json: bool) -> str:
    """Return the report of one run; JSON includes the environment."""
    if as_json:
        return json.dumps({"bench": name, **values, "environment": asdict(environment())})
    width = max(map(len, values))
    return "\n".join(
        [name, *(f"  {key:<{width}}  {_spelled(value)}" for key, value in values.items())]
    )


def _spelled(value: Value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
