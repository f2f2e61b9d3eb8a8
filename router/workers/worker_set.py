"""Set of known workers: those that a source lists, and unlisted ones that still have streams.

A worker is watched from the moment it is listed. An unlisted worker gets no new requests. Its
channel is kept until its last request has ended, so no request is cut off. If it is listed again
before that, it keeps its state.
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
WatchWorker = Callable[[Worker], Coroutine[None, None, None]]


def open_source(
    target: str, options: DiscoveryOptions, errors: Counter, rng: random.Random
) -> Source:
    """Return the source that a target names.

    Raises:
        ConfigError: the target is malformed.
    """
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
    """Aggregates that routers need after every report, updated as workers change.

    Computing them from all workers each time would take quadratic time.
    """

    def __init__(self) -> None:
        self._kinds: dict[tuple[WorkerRole, str], str] = {}  # compatibility of usable workers
        self._num_usable: dict[WorkerRole, dict[str, int]] = {role: {} for role in WorkerRole}
        self._starts_s: dict[tuple[WorkerRole, str], float] = {}
        self._slowest_s: float | None = 0.0  # None: must be computed

    def count(self, worker: Worker) -> bool:
        """Update the aggregates after a possible change; return whether its usability or kind
        changed.
        """
        key = (worker.role, worker.address)
        num_usable = self._num_usable[worker.role]
        before = self._kinds.get(key)
        after = worker.compatibility if worker.is_usable else None
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
        """Remove a worker that was not usable."""
        self._started((role, address), 0.0)
        del self._starts_s[role, address]

    def compatibilities(self, role: WorkerRole) -> Collection[str]:
        """Return the compatibility digests of usable workers."""
        return self._num_usable[role].keys()

    @property
    def slowest_start_s(self) -> float:
        """Return the slowest of the latest starts, in seconds; 0 without any."""
        if self._slowest_s is None:
            self._slowest_s = max(self._starts_s.values(), default=0.0)
        return self._slowest_s

    def _started(self, key: tuple[WorkerRole, str], start_s: float) -> None:
        before = self._starts_s.get(key, 0.0)
        self._starts_s[key] = start_s
        if self._slowest_s is not None:
            self._slowest_s = (
                max(start_s, self._slowest_s)
                if before < self._slowest_s or start_s >= before
                else None
            )


@dataclass(frozen=True)
class UsableWorkers:
    """Usable workers of one role, in order of appearance.

    `shortest` is the capacity of the smallest worker in tokens. `block_kinds` are their page sizes
    and digests.
    """

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
    """Cache of usable workers; rebuilt when a worker becomes usable or unusable, not for every
    request.
    """

    def __init__(self, workers_of: Callable[[WorkerRole], Iterable[Worker]]) -> None:
        super().__init__()
        self._workers_of = workers_of

    def __missing__(self, role: WorkerRole) -> UsableWorkers:
        found = self[role] = UsableWorkers.of(self._workers_of(role))
        return found


class WorkerSet:
    """All workers of a router. Build inside a running event loop.

    Addresses from static targets are present from the start, others while `run` runs.
    """

    def __init__(
        self, sources: Mapping[WorkerRole, Sequence[Source]], make: Make, watch: WatchWorker
    ) -> None:
        self._sources = [(role, source) for role, several in sources.items() for source in several]
        self._make = make
        self._watch = watch
        self._listed: list[frozenset[str]] = [frozenset() for _ in self._sources]
        self._workers: dict[tuple[WorkerRole, str], Worker] = {}
        # The subset that no source lists any more.
        self._unlisted: dict[tuple[WorkerRole, str], Worker] = {}
        self._watches: dict[tuple[WorkerRole, str], asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._aliases = Aliases()
        self.tally = Tally()
        self._usable = _UsableByRole(self.of)
        self.usable: Mapping[WorkerRole, UsableWorkers] = self._usable
        self.version = 0  # incremented when the set of workers changes
        for index, (_, source) in enumerate(self._sources):
            if isinstance(source, StaticSource):
                self._list(index, frozenset({source.address}))
        self._sort()

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Return the workers, prefill first, in order of appearance; one with several addresses
        once.
        """
        return self._all

    def holding(self, role: WorkerRole, context_tokens: int = 0) -> Sequence[Worker]:
        """Return the usable workers of a role that can hold so many tokens, with room or not."""
        usable = self.usable[role]
        if context_tokens <= usable.shortest:
            return usable.workers
        return [worker for worker in usable.workers if worker.snapshot.longest >= context_tokens]

    def of(self, role: WorkerRole) -> tuple[Worker, ...]:
        """Return the workers of a role in order of appearance."""
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
        """Update the set after a change of a worker or its requests; return whether usable workers
        changed.

        Of the other workers, only unlisted ones are checked.
        """
        others = self._aliases.changed(worker)
        is_other = self._count(worker, *others)
        if others:
            self._sort()
        if self._unlisted:
            self._sweep()
        return is_other

    def _count(self, *workers: Worker) -> bool:
        """Update the tally; return whether one of these workers became usable or unusable."""
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
        """Apply the difference between the new and the previous addresses of a source."""
        (role, _) = self._sources[index]
        before = self._listed[index]
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
