"""Injection of a storm's scheduled faults into the processes of a cluster."""

import asyncio
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from baton.client import AsyncBatonClient
from baton.cluster import LocalCluster
from baton.fork_server import ProcessPlaces
from baton.roles import set_roles
from bench.storm.adapters import StormAdapters
from bench.storm.cache_server import StormServer
from bench.storm.clients import StormClients
from bench.storm.control import Control
from bench.storm.schedule import FaultKind, StormFault
from runtime.errors import BatonError
from runtime.security.access import PLAIN_CHANNEL

ALL_ROLES = ("prefill", "decode")
ROLES_RETRY_S, ROLES_BACK_S = 0.5, 60.0
FEWER_ROLES = (("prefill",), ("decode",))
DISK_BYTES = 1 << 20
_BLOCK = bytes(4096)


class StormPlaces(ProcessPlaces):
    """Processes on this machine's loopback, inside `bench.storm.child`, each with its control."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.controls: dict[str, Control] = {}

    def host(self, name: str) -> str:
        return "127.0.0.1"

    def program(
        self, name: str, module: str, arguments: Sequence[str]
    ) -> tuple[str, Sequence[str]]:
        path = self._folder / f"{name}.control"
        if name not in self.controls:
            self.controls[name] = Control.create(path)
        self.controls[name].reset()  # a new process starts with the true clock
        return "bench.storm.child", (str(path), module, *arguments)


class SmallDisk:
    """File system of one megabyte that can be filled.

    It needs the right to mount; `is_there` is whether that succeeded.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_there = False
        self._filler = folder / "filler"

    def __enter__(self) -> Self:
        self.folder.mkdir()
        command = [
            "mount",
            "-t",
            "tmpfs",
            "-o",
            f"size={DISK_BYTES}",
            "baton-storm",
            str(self.folder),
        ]
        try:
            self.is_there = (
                subprocess.run(command, capture_output=True, timeout=30, check=False).returncode
                == 0
            )
        except FileNotFoundError:
            self.is_there = False
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.is_there:
            subprocess.run(
                ["umount", "-l", str(self.folder)], capture_output=True, timeout=30, check=False
            )

    def fill(self) -> None:
        with suppress(OSError), self._filler.open("ab", buffering=0) as file:
            while file.write(_BLOCK):
                pass

    def empty(self) -> None:
        self._filler.unlink(missing_ok=True)


@dataclass(frozen=True)
class Equipment:
    """Contents of a storm's folder: what its cluster needs, and what faults need."""

    folder: Path
    places: StormPlaces
    disk: SmallDisk
    clients: StormClients
    adapters: StormAdapters | None
    server: StormServer


class Injector:
    """Injector of faults; `heal` ends all faults in progress."""

    def __init__(self, cluster: LocalCluster, equipment: Equipment) -> None:
        self._cluster = cluster
        self._equipment = equipment
        self._stopped: set[int] = set()
        self.done: Counter[FaultKind] = Counter()

    @property
    def processes(self) -> list[str]:
        """Return the names of all possible victims."""
        return sorted(self._cluster.processes)

    @property
    def possible(self) -> frozenset[FaultKind]:
        """Return the kinds of faults that this machine permits."""
        there = {
            FaultKind.DISK: self._equipment.disk.is_there,
            FaultKind.SERVER: self._equipment.server.is_there,
        }
        return frozenset(kind for kind in FaultKind if there.get(kind, True))

    async def run(self, faults: Sequence[StormFault], start_s: float) -> None:
        await asyncio.gather(*(self._one(fault, start_s) for fault in faults))

    async def _one(self, fault: StormFault, start_s: float) -> None:
        await asyncio.sleep(max(start_s + fault.at_s - time.monotonic(), 0.0))
        self.done[fault.kind] += 1
        control = self._equipment.places.controls[fault.victim]
        match fault.kind:
            case FaultKind.KILL:
                self._kill(fault.victim)
            case FaultKind.STOP:
                await self._stop(fault)
            case FaultKind.DRAIN:
                self._kill(fault.victim, signal.SIGTERM)
            case FaultKind.FRAME:
                control.flip_frames(1)
            case FaultKind.ITEM:
                control.flip_items(1)
            case FaultKind.CLOCK:
                control.shift_clock(fault.amount)
            case _:
                await self._act(fault)

    async def _act(self, fault: StormFault) -> None:
        """Fill the disk, or do what an operator does."""
        match fault.kind:
            case FaultKind.DISK:
                self._equipment.disk.fill()
                self._kill(fault.victim)
                await asyncio.sleep(fault.amount)
                self._equipment.disk.empty()
            case FaultKind.ADAPTER:
                assert self._equipment.adapters is not None
                await self._equipment.adapters.change(
                    self._cluster.addresses, self._equipment.clients.operator
                )
            case FaultKind.FLUSH:
                await self._flush()
            case FaultKind.SERVER:
                await self._equipment.server.fail(self.done[fault.kind], fault.amount)
            case FaultKind.ROLES:
                await self._give_roles(fault.victim, FEWER_ROLES[self.done[fault.kind] % 2])
                await asyncio.sleep(fault.amount)
                await self._give_roles_back(fault.victim)

    def _kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        pid = self._cluster.processes[name].pid
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    async def _stop(self, fault: StormFault) -> None:
        pid = self._cluster.processes[fault.victim].pid
        if pid is None:
            return
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            self._stopped.add(pid)
            await asyncio.sleep(fault.amount)
            os.kill(pid, signal.SIGCONT)
        self._stopped.discard(pid)

    async def _flush(self) -> None:
        security = self._equipment.clients.operator
        async with AsyncBatonClient(*self._cluster.addresses, security=security) as client:
            with suppress(BatonError):
                await client.flush_caches()

    async def _give_roles_back(self, name: str) -> None:
        """Give a worker all its roles, though it may be stopped now, or its pool broken."""
        with suppress(TimeoutError):
            async with asyncio.timeout(ROLES_BACK_S):
                while not await self._give_roles(name, ALL_ROLES):  # noqa: ASYNC110
                    await asyncio.sleep(ROLES_RETRY_S)

    async def _give_roles(self, name: str, roles: Sequence[str]) -> bool:
        """Make a worker serve these roles; return whether it does."""
        if (announced := self._cluster.processes[name].announcement) is not None:
            with suppress(BatonError):
                await set_roles(announced.address, roles, PLAIN_CHANNEL)
                return True
        return False

    def heal(self) -> None:
        for pid in self._stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._stopped.clear()
        self._equipment.disk.empty()
        self._equipment.server.heal()
        for control in self._equipment.places.controls.values():
            control.reset()
