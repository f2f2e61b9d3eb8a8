"""The workers there are: those that some source lists, and those that none lists any more but that still stream.

A worker is watched from the moment it is listed. When it is listed no more, it gets nothing new; its channel stays
until the last request on it has ended, so nothing is cut. Listed again before that, it is the worker it was.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path

from prometheus_client import Counter

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


def open_source(target: str, options: DiscoveryOptions, errors: Counter, rng: random.Random) -> Source:
    """What a target names. Raises ConfigError."""
    place = parse_target(target)
    if isinstance(place, Path):
        return FileSource(place)
    if isinstance(place, ServiceTarget):
        return EndpointSource(place, options, errors, rng)
    return DnsSource(place, options.interval_s, errors) if target.startswith(DNS) else StaticSource(str(place))


class WorkerSet:
    """Build inside a running event loop. Addresses given outright are there from the start, others while `run` runs."""

    def __init__(self, sources: Mapping[WorkerRole, Sequence[Source]], make: Make, watch: Watch) -> None:
        self._sources = [(role, source) for role, several in sources.items() for source in several]
        self._make = make
        self._watch = watch
        self._listed: list[frozenset[str]] = [frozenset() for _ in self._sources]
        self._workers: dict[tuple[WorkerRole, str], Worker] = {}
        self._unlisted: dict[tuple[WorkerRole, str], Worker] = {}  # of these, those that none lists any more
        self._watches: dict[tuple[WorkerRole, str], asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._sort()
        for index, (_, source) in enumerate(self._sources):
            if isinstance(source, StaticSource):
                self._found(index, frozenset({source.address}))

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Prefill first, then by address in order of appearance."""
        return tuple(worker for role in WorkerRole for worker in self.of(role))

    def of(self, role: WorkerRole) -> tuple[Worker, ...]:
        """In order of appearance."""
        return self._by_role[role]

    def _sort(self) -> None:
        self._by_role = {role: tuple(worker for (kind, _), worker in self._workers.items() if kind is role)
                         for role in WorkerRole}

    async def run(self) -> None:
        """Follow every source and watch every worker, until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            for worker in self.workers:
                self._attend(worker)
            for index, (_, source) in enumerate(self._sources):
                group.create_task(source.run(partial(self._found, index)))

    def sweep(self) -> None:
        """Drop workers that are neither listed nor in use. Called at every change of any worker, so listed ones are not
        looked at."""
        for key, worker in list(self._unlisted.items()):
            if not worker.is_in_use:
                del self._workers[key], self._unlisted[key]
                self._sort()
                if key in self._watches:
                    self._watches.pop(key).cancel()
                logger.info("worker forgotten", extra={"worker": worker.address})

    def _found(self, index: int, addresses: frozenset[str]) -> None:
        role, _ = self._sources[index]
        if self._listed[index] == addresses:
            return
        self._listed[index] = addresses
        listed = frozenset[str]().union(*(known for known, (other, _) in zip(self._listed, self._sources, strict=True)
                                          if other is role))
        for address in sorted(listed - {known for kind, known in self._workers if kind is role}):
            self._workers[role, address] = worker = self._make(role, address)
            self._attend(worker)
        self._sort()
        for (kind, address), worker in list(self._workers.items()):
            if kind is not role:
                continue
            if address in listed:
                self._unlisted.pop((kind, address), None)
                worker.listed()
            else:
                self._unlisted[kind, address] = worker
                worker.delisted()
        self.sweep()

    def _attend(self, worker: Worker) -> None:
        if self._group is not None:
            self._watches[worker.role, worker.address] = self._group.create_task(self._attended(worker))

    async def _attended(self, worker: Worker) -> None:
        try:
            await self._watch(worker)
        finally:
            await worker.channel.close()
