"""The workers there are: those that some source lists, and those that none lists any more but that
still stream.

A worker is watched from the moment it is listed. When it is listed no more, it gets nothing new;
its channel stays until the last request on it has ended, so nothing is cut. Listed again before
that, it is the worker it was.
"""

import asyncio
import logging
import math
import random
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from prometheus_client import Counter

from router.workers.aliases import Aliases
from router.workers.discovery import (
    DNS,
    DiscoveryOptions,
    DnsSource,
    FileSource,
    ServiceTarget,
    Source,
    StaticSource,
    parse_target,
)
from router.workers.endpoints import EndpointSource
from router.workers.worker import Worker, WorkerRole

logger = logging.getLogger(__name__)

Make = Callable[[WorkerRole, str], Worker]
Watch = Callable[[Worker], Coroutine[None, None, None]]


def open_source(
    target: str, options: DiscoveryOptions, errors: Counter, rng: random.Random
) -> Source:
    """What a target names. Raises ConfigError."""
    place = parse_target(target)
    if isinstance(place, Path):
        return FileSource(place)
    if isinstance(place, ServiceTarget):
        return EndpointSource(place, options, errors, rng)
    return (
        DnsSource(place, options.interval_s, errors)
        if target.startswith(DNS)
        else StaticSource(str(place))
    )


class Tally:
    """What routers ask after every report, kept as workers change: to count all of them anew each
    time would take them the square of their number."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[WorkerRole, str], str] = {}  # compatibility of usable workers
        self._num_usable: dict[WorkerRole, dict[str, int]] = {role: {} for role in WorkerRole}
        self._starts_s: dict[tuple[WorkerRole, str], float] = {}
        self._slowest_s: float | None = 0.0  # None: to be looked for

    def count(self, worker: Worker) -> bool:
        """It has changed, perhaps. Returns whether it is usable as it was not before, or not any
        more."""
        key, num_usable = (worker.role, worker.address), self._num_usable[worker.role]
        before, after = self._kinds.get(key), worker.compatibility if worker.is_usable else None
        if before != after:
            if before is not None:
                del self._kinds[key]
                num_usable[before] -= 1
                if not num_usable[before]:
                    del num_usable[before]
            if after is not None:
                self._kinds[key] = after
                num_usable[after] = num_usable.get(after, 0) + 1
        if self._starts_s.get(key) != worker.start_s:
            self._started(key, worker.start_s)
        return before != after

    def forget(self, role: WorkerRole, address: str) -> None:
        """It is gone; it was not usable."""
        self._started((role, address), 0.0)
        del self._starts_s[role, address]

    def compatibilities(self, role: WorkerRole) -> Collection[str]:
        """Of usable workers."""
        return self._num_usable[role].keys()

    @property
    def slowest_start_s(self) -> float:
        """Of the last starts; 0 without any."""
        if self._slowest_s is None:
            self._slowest_s = max(self._starts_s.values(), default=0.0)
        return self._slowest_s

    def _started(self, key: tuple[WorkerRole, str], start_s: float) -> None:
        before, self._starts_s[key] = self._starts_s.get(key, 0.0), start_s
        if self._slowest_s is not None:
            self._slowest_s = (
                max(start_s, self._slowest_s)
                if before < self._slowest_s or start_s >= before
                else None
            )


@dataclass(frozen=True)
class UsableWorkers:
    """Of one role, in order of appearance. `shortest`: what the smallest of them can hold, in
    tokens. `block_kinds`: their page sizes and digests."""

    workers: tuple[Worker, ...] = ()
    shortest: float = math.inf
    block_kinds: frozenset[tuple[int, str]] = frozenset()
    addresses: frozenset[str] = frozenset()

    @classmethod
    def of(cls, workers: Iterable[Worker]) -> "UsableWorkers":
        usable = tuple(worker for worker in workers if worker.is_usable)
        snapshots = [worker.snapshot for worker in usable]
        return cls(
            usable,
            min((snapshot.longest for snapshot in snapshots), default=math.inf),
            frozenset((snapshot.page_size, snapshot.compatibility) for snapshot in snapshots),
            frozenset(worker.address for worker in usable),
        )


class _UsableByRole(dict[WorkerRole, UsableWorkers]):
    """Looked for when some worker came to be usable, or ceased to be: not for every request."""

    def __init__(self, workers_of: Callable[[WorkerRole], Iterable[Worker]]) -> None:
        super().__init__()
        self._workers_of = workers_of

    def __missing__(self, role: WorkerRole) -> UsableWorkers:
        found = self[role] = UsableWorkers.of(self._workers_of(role))
        return found


class WorkerSet:
    """Build inside a running event loop. Addresses given outright are there from the start, others
    while `run` runs."""

    def __init__(
        self, sources: Mapping[WorkerRole, Sequence[Source]], make: Make, watch: Watch
    ) -> None:
        self._sources = [(role, source) for role, several in sources.items() for source in several]
        self._make = make
        self._watch = watch
        self._listed: list[frozenset[str]] = [frozenset() for _ in self._sources]
        self._workers: dict[tuple[WorkerRole, str], Worker] = {}
        self._unlisted: dict[
            tuple[WorkerRole, str], Worker
        ] = {}  # of these, those that none lists any more
        self._watches: dict[tuple[WorkerRole, str], asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._aliases = Aliases()
        self.tally = Tally()
        self._usable = _UsableByRole(self.of)
        self.usable: Mapping[WorkerRole, UsableWorkers] = self._usable
        self.version = 0  # rises when there are other workers
        for index, (_, source) in enumerate(self._sources):
            if isinstance(source, StaticSource):
                self._list(index, frozenset({source.address}))
        self._sort()

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Prefill first, then by address in order of appearance. One that has several is there
        once."""
        return self._all

    def of(self, role: WorkerRole) -> tuple[Worker, ...]:
        """In order of appearance."""
        return self._by_role[role]

    def find(self, role: WorkerRole, address: str) -> Worker | None:
        return self._workers.get((role, address))

    def _sort(self) -> None:
        self.version += 1
        self._by_role = {
            role: tuple(
                worker
                for (kind, _), worker in self._workers.items()
                if kind is role and not worker.same_as
            )
            for role in WorkerRole
        }
        self._all = tuple(worker for role in WorkerRole for worker in self._by_role[role])
        self._usable.clear()

    async def run(self) -> None:
        """Follow every source and watch every worker, until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            for worker in self.workers:
                self._attend(worker)
            for index, (_, source) in enumerate(self._sources):
                group.create_task(source.run(partial(self._found, index)))

    def changed(self, worker: Worker) -> bool:
        """It has, or its requests. Of others only those are looked at that are not listed any more.
        Returns whether other workers are usable than before."""
        others = self._aliases.changed(worker)
        is_other = self._count(worker, *others)
        if others:
            self._sort()
        if self._unlisted:
            self._sweep()
        return is_other

    def _count(self, *workers: Worker) -> bool:
        """Return whether one of these is usable as it was not before, or not any more."""
        are_other = [self.tally.count(worker) for worker in workers]
        if any(are_other):
            self._usable.pop(workers[0].role, None)
        return any(are_other)

    def _sweep(self) -> None:
        """Drop workers that are neither listed nor in use."""
        for key, worker in list(self._unlisted.items()):
            if not worker.is_in_use:
                del self._workers[key], self._unlisted[key]
                if others := self._aliases.forget(worker):
                    self._count(*others)
                self.tally.forget(*key)
                self._sort()
                if key in self._watches:
                    self._watches.pop(key).cancel()
                logger.info("worker forgotten", extra={"worker": worker.address})

    def _found(self, index: int, addresses: frozenset[str]) -> None:
        if self._listed[index] != addresses:
            self._list(index, addresses)
            self._sort()
            self._sweep()

    def _list(self, index: int, addresses: frozenset[str]) -> None:
        """Only at what a source lists more or less than before is looked."""
        (role, _), before = self._sources[index], self._listed[index]
        self._listed[index] = addresses
        for address in sorted(addresses - before):
            worker = self._workers.get((role, address))
            if worker is None:
                self._workers[role, address] = worker = self._make(role, address)
                self._attend(worker)
            self._unlisted.pop((role, address), None)
            worker.listed()
        for address in sorted(before - addresses):
            others = (
                known
                for known, (other, _) in zip(self._listed, self._sources, strict=True)
                if other is role
            )
            if not any(address in known for known in others):
                self._unlisted[role, address] = self._workers[role, address]
                self._workers[role, address].delisted()

    def _attend(self, worker: Worker) -> None:
        if self._group is not None:
            self._watches[worker.role, worker.address] = self._group.create_task(
                self._attended(worker)
            )

    async def _attended(self, worker: Worker) -> None:
        try:
            await self._watch(worker)
        finally:
            await worker.channel.close()
