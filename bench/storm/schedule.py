"""Schedule of a storm; the same seed gives the same storm."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

T = TypeVar("T")


class FaultKind(StrEnum):
    KILL = "kill"  # SIGKILL
    STOP = "stop"  # SIGSTOP, later SIGCONT
    DRAIN = "drain"  # SIGTERM: the process drains and ends, and another one starts
    FRAME = "frame"  # one bit of a frame between stages
    ITEM = "item"  # one bit of a handed over item
    DISK = "disk"  # all writes fail for a while, and a process is killed meanwhile
    CLOCK = "clock"  # the wall clock jumps
    ADAPTER = "adapter"  # an adapter gets another version, on all workers
    FLUSH = "flush"  # all prefix caches are emptied
    SERVER = "server"  # the cache server dies or freezes for a while, or damages what it has
    ROLES = "roles"  # a worker of both roles serves one of them for a while


STOP_S = (0.5, 8.0)  # a silent peer is detected after four
DISK_S = 2.0
CLOCK_JUMPS_S = (-86400.0, -60.0, 3600.0)


@dataclass(frozen=True)
class StormFault:
    """Scheduled fault.

    `amount`: duration in seconds, or the seconds of a clock's jump; 0 if neither applies.
    """

    at_s: float
    kind: FaultKind
    victim: str
    amount: float = 0.0


@dataclass(frozen=True)
class Weather:
    """Frequency of faults.

    `kill_every_s` is the pause between two kills, `other_every_s` that between two faults of the
    other kinds, which alternate. The first and last `calm_s` have no faults.
    """

    seconds: float
    kinds: frozenset[FaultKind]
    kill_every_s: float = 10.0
    other_every_s: float = 7.0
    calm_s: float = 4.0


def forecast(weather: Weather, processes: Sequence[str], *, seed: int) -> list[StormFault]:
    """Return the faults in order of time; kills per process differ by at most one."""
    rng = random.Random(seed)
    senders = _senders(processes)
    faults = [
        StormFault(at_s, FaultKind.KILL, victim)
        for at_s, victim in zip(
            _times(weather, weather.kill_every_s), _turns(processes, rng), strict=False
        )
    ]
    if FaultKind.KILL not in weather.kinds:
        faults = []
    others = [
        kind
        for kind in FaultKind
        if kind in weather.kinds and kind is not FaultKind.KILL and senders.get(kind, processes)
    ]
    if others:
        turns = _turns(others, rng)
        faults += [
            _fault(at_s, kind := next(turns), senders.get(kind, processes), rng)
            for at_s in _times(weather, weather.other_every_s)
        ]
    return sorted(faults, key=lambda fault: fault.at_s)


def _times(weather: Weather, every_s: float) -> list[float]:
    last_s = weather.seconds - weather.calm_s
    count = int((last_s - weather.calm_s) / every_s) + 1 if last_s > weather.calm_s else 0
    return [weather.calm_s + index * every_s for index in range(count)]


def _turns(items: Sequence[T], rng: random.Random) -> Iterator[T]:
    """Yield all items in random order, again and again."""
    while True:
        yield from rng.sample(items, len(items))


def _senders(processes: Sequence[str]) -> dict[FaultKind, Sequence[str]]:
    """Return the possible victims of the faults that only some of the processes can have."""
    workers = [name for name in processes if not name.startswith("router")]
    return {
        FaultKind.FRAME: [name for name in workers if "." in name],
        FaultKind.ITEM: [name for name in workers if name.startswith(("prefill", "worker"))],
        FaultKind.DISK: workers,
        FaultKind.ROLES: [name for name in workers if name.startswith("worker") and leads(name)],
    }


def leads(name: str) -> bool:
    """Return whether the process of this name is the leader of its pool."""
    return "." not in name or name.endswith(".0")


def _fault(at_s: float, kind: FaultKind, victims: Sequence[str], rng: random.Random) -> StormFault:
    victim = rng.choice(victims)
    amounts = {
        FaultKind.STOP: rng.uniform(*STOP_S),
        FaultKind.ROLES: rng.uniform(*STOP_S),
        FaultKind.DISK: DISK_S,
        FaultKind.SERVER: rng.uniform(*STOP_S),
        FaultKind.CLOCK: rng.choice(CLOCK_JUMPS_S),
    }
    return StormFault(at_s, kind, victim, amounts.get(kind, 0.0))
