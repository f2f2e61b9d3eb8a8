"""Faults of a fleet.

kill:decode-3@120        dies at 120 s, and restarts
kill:decode-3@120+30     the same, but is away for 30 s before the restart
cut:prefill-0@60+5       is unreachable for 5 s
slow:prefill-1@60+30x3   takes three times as long for everything, for 30 s
restart:decode@100       rolling restart of a role: each worker drains, ends and starts again
lose:router-1@60         a router dies for good
"""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from runtime.errors import ConfigError
from sim.process import SimulatedProcess
from sim.router import RouterProcess

DRAIN_S = 1.0  # from handing requests back to the end of the process
_FORM = re.compile(r"(\w+):([\w-]+)@([\d.]+)(?:\+([\d.]+))?(?:x([\d.]+))?")


class MishapKind(StrEnum):
    KILL = "kill"
    CUT = "cut"
    SLOW = "slow"
    RESTART = "restart"
    LOSE = "lose"


@dataclass(frozen=True)
class Mishap:
    """A fault. `at_s` counts from the earliest possible request; `for_s` and `factor` depend on the
    kind.
    """

    kind: MishapKind
    target: str
    at_s: float
    for_s: float = 0.0
    factor: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text form of a fault.

        Raises:
            ConfigError: the text is malformed.
        """
        found = _FORM.fullmatch(text)
        if found is None or found[1] not in set(MishapKind):
            raise ConfigError(
                f"a fault is like kill:decode-3@120+30, slow:prefill-1@60+30x3 or restart:decode@100; "
                f"its kinds are {', '.join(MishapKind)}; got {text!r}",
                field="fault",
            )
        kind = MishapKind(found[1])
        for_s = float(found[4] or 0)
        factor = float(found[5] or 1)
        if (kind in (MishapKind.CUT, MishapKind.SLOW) and for_s <= 0) or (
            kind is MishapKind.SLOW and factor <= 0
        ):
            raise ConfigError(
                f"{kind} needs a duration, as in {kind}:prefill-0@60+5; got {text!r}", field="fault"
            )
        return cls(kind, found[2], float(found[3]), for_s, factor)


async def unleash(
    fault: Mishap, workers: Mapping[str, SimulatedProcess], routers: Mapping[str, RouterProcess]
) -> None:
    """Wait for the start of a fault and play it to its end. `check_target` must have passed."""
    await asyncio.sleep(fault.at_s)
    match fault.kind:
        case MishapKind.LOSE:
            routers[fault.target].die()
        case MishapKind.RESTART:
            for worker in [each for each in workers.values() if each.role == fault.target]:
                await _restart(worker)
        case MishapKind.KILL:
            worker = workers[fault.target]
            worker.die()
            await asyncio.sleep(fault.for_s + worker.start_s)
            worker.start()
        case MishapKind.CUT:
            workers[fault.target].cut()
            await asyncio.sleep(fault.for_s)
            workers[fault.target].heal()
        case MishapKind.SLOW:
            workers[fault.target].slow_down(fault.factor)
            await asyncio.sleep(fault.for_s)
            workers[fault.target].slow_down(1.0)


def check_target(
    fault: Mishap, workers: Mapping[str, SimulatedProcess], routers: Mapping[str, RouterProcess]
) -> None:
    """Check that the target of a fault exists.

    Raises:
        ConfigError: it does not; the error names the range of targets.
    """
    roles = {worker.role: None for worker in workers.values()}
    there = {MishapKind.LOSE: list(routers), MishapKind.RESTART: list(roles)}.get(
        fault.kind, list(workers)
    )
    if fault.target not in there:
        raise ConfigError(
            f"there is no {fault.target} to {fault.kind}; there are {there[0]} to {there[-1]}",
            field="fault",
        )


async def _restart(worker: SimulatedProcess) -> None:
    worker.drain()
    await asyncio.sleep(DRAIN_S)
    worker.die()
    await asyncio.sleep(worker.start_s)
    worker.start()
