"""How every benchmark reports: one JSON object on stdout with --json, aligned lines for people otherwise."""

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
