"""Worker directory: the workers that there are, and those that are usable.

Workers are configured or discovered (`router.workers.discovery`). Each is watched over one
`Worker.Watch` stream. A worker is usable while that stream is alive, reports that it serves, and
describes the router's model. `WorkerPlacement` chooses among them; `CacheView` knows their caches.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import grpc

from protos import generation_pb2
from router.text.model_facts import ModelLimits
from router.workers import report
from router.workers.adapters import has_adapter, served_adapters
from router.workers.cache_view import CacheView
from router.workers.discovery import DiscoveryOptions
from router.workers.placement import WorkerPlacement
from router.workers.policy import Policy
from router.workers.watch import MAX_BACKOFF_S, Follow, follow_stream, watch_worker
from router.workers.worker import Worker, WorkerRole
from router.workers.worker_set import WorkerSet, open_source
from runtime.clock import Clock, SystemClock
from runtime.digests import may_pair
from runtime.observe.metrics.router import RouterMetrics
from runtime.rpc.client import ChannelOptions, open_channel
from runtime.security.access import PLAIN_CHANNEL, ChannelSecurity, PeerRole

T = TypeVar("T")
Connect = Callable[[WorkerRole, str], grpc.aio.Channel]

START_MARGIN = 1.5  # a start takes longer under load, and its end is noticed late


@dataclass(frozen=True)
class DirectoryOptions:
    """Options of a directory.

    `prefill` and `decode` are targets (`router.workers.discovery`), `watch_interval_s` is the
    interval of load reports, `longest_restart_s` the upper bound of `restart_estimate_s`. A pull from
    another worker must save `pull_tokens` prompt tokens; 0: there are none.
    """

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    policy: Policy = Policy.PREFIX_CACHE
    watch_interval_s: float = 0.25
    security: ChannelSecurity = PLAIN_CHANNEL
    discovery: DiscoveryOptions = field(default_factory=DiscoveryOptions)
    longest_restart_s: float = 0.0
    pull_tokens: int = 0


class Directory:
    """Workers of one model. Build inside a running event loop; `run` watches until cancelled."""

    def __init__(
        self,
        options: DirectoryOptions,
        facts: ModelLimits,
        metrics: RouterMetrics,
        rng: random.Random,
        clock: Clock | None = None,
        connect: Connect | None = None,
        follow: Follow = follow_stream,
    ) -> None:
        """`connect` opens the channels to workers, by default over the network as `options`
        specify. `follow` applies their reports.
        """
        self._options = options
        self._clock = clock or SystemClock()
        self._connect = connect or self._open_channel
        self._follow = follow
        self._facts = facts
        self._metrics = metrics
        self._rng = rng
        self.caches = CacheView()
        self._changed: asyncio.Event | None = None  # None while no task waits for a change
        self._pairing_changed = asyncio.Event()
        self._infos: dict[tuple[WorkerRole, str], object] = {}  # latest info of each worker
        # (version of the set, limits); None after a worker reported a new info.
        self._present: tuple[int, ModelLimits] | None = None
        self._pairless_since_s: float | None = self._clock.now()
        sources = {
            role: [
                open_source(target, options.discovery, metrics.discovery_errors, rng)
                for target in targets
            ]
            for role, targets in (
                (WorkerRole.PREFILL, options.prefill),
                (WorkerRole.DECODE, options.decode),
            )
        }
        self._worker_set = WorkerSet(sources, self._worker, self._watch)
        self.placement = WorkerPlacement(
            self._worker_set,
            self.caches,
            options.policy,
            metrics,
            rng,
            self._clock,
            options.pull_tokens,
        )
        for role in WorkerRole:
            metrics.workers.labels(role.value, "usable").set_function(
                partial(self._num_workers, role, is_usable=True)
            )
            metrics.workers.labels(role.value, "unusable").set_function(
                partial(self._num_workers, role, is_usable=False)
            )

    @property
    def workers(self) -> tuple[Worker, ...]:
        return self._worker_set.workers

    async def run(self) -> None:
        """Discover and watch every worker."""
        await self._worker_set.run()

    def _worker(self, role: WorkerRole, address: str) -> Worker:
        worker = Worker(
            role,
            address,
            self._connect(role, address),
            lambda: self._on_change(worker),
            self._wake,
            self._clock,
            self.caches.of_role[role],
            self._options.security.shown,
        )
        return worker

    def _open_channel(self, role: WorkerRole, address: str) -> grpc.aio.Channel:
        return open_channel(
            address,
            ChannelOptions(max_reconnect_backoff_s=MAX_BACKOFF_S),
            security=self._options.security.to(PeerRole(role.value)),
        )

    def _watch(self, worker: Worker) -> Coroutine[None, None, None]:
        return watch_worker(
            worker, self._facts, self._options.watch_interval_s, self._rng, self._follow
        )

    async def changed(self) -> None:
        """Return at the next change of any worker or booking."""
        if self._changed is None:
            self._changed = asyncio.Event()
        await self._changed.wait()

    async def until(self, attempt: Callable[[], T | None]) -> T:
        """Call `attempt` now and after every change, until it returns a result."""
        while (result := attempt()) is None:
            await self.changed()
        return result

    async def until_paired(self, *, is_paired: bool) -> None:
        """Return when some pair can serve, or when none can any more. Bookings and reports do not
        wake it.
        """
        while self.is_paired is not is_paired:
            await self._pairing_changed.wait()

    @property
    def facts(self) -> ModelLimits:
        """Return the model's limits on these workers, those away now included.

        The context is that of the largest pair seen so far: smaller workers get only requests that
        they can hold. The adapters are those that workers offer.
        """
        version = self._worker_set.version
        if self._present is None or self._present[0] != version:
            self._present = (
                version,
                replace(
                    self._facts,
                    max_context_tokens=self._largest_pair(),
                    adapters=served_adapters(self.workers),
                ),
            )
        return self._present[1]

    def knows_adapter(self, role: WorkerRole, key: str) -> bool:
        """Return whether a worker of the role has the adapter, those away now included."""
        return any(has_adapter(worker, key) for worker in self.workers if worker.role is role)

    def _largest_pair(self) -> int:
        # By role, then compatibility.
        largest: dict[WorkerRole, dict[str, int]] = {role: {} for role in WorkerRole}
        for worker in self.workers:
            if (num_tokens := worker.max_context_tokens) is not None:
                known = largest[worker.role]
                known[worker.compatibility] = max(num_tokens, known.get(worker.compatibility, 0))
        prefill = largest[WorkerRole.PREFILL]
        decode = largest[WorkerRole.DECODE]
        pairs = [
            min(source, pool)
            for here, source in prefill.items()
            for there, pool in decode.items()
            if may_pair(here, there)
        ]
        alone = [max(known.values()) for known in (prefill, decode) if known]
        return min([self._facts.max_context_tokens, *([max(pairs)] if pairs else alone)])

    @property
    def restart_estimate_s(self) -> float:
        """Return how long the restart of a lost worker may take, from the latest starts."""
        return min(
            START_MARGIN * self._worker_set.tally.slowest_start_s, self._options.longest_restart_s
        )

    @property
    def revision(self) -> str:
        """Return the digest of the weights that a pair reports; empty while there is no pair."""
        usable = self._worker_set.holding(WorkerRole.DECODE) if self.is_paired else ()
        return next((worker.info.revision for worker in usable if worker.info is not None), "")

    def refusal(self) -> str:
        """Return why no pair can serve, in a form for clients; empty if one can."""
        return "" if self.is_paired else report.refusal(self.workers)

    @property
    def is_paired(self) -> bool:
        """Return whether some prefill and decode worker can serve together."""
        return self._pairless_since_s is None

    @property
    def pairless_s(self) -> float:
        """Return for how long no pair could serve, in seconds; 0 while one can."""
        return 0.0 if self._pairless_since_s is None else self._clock.now() - self._pairless_since_s

    def pair_problem(self) -> str:
        """Return why no pair can serve, in a form for operators; empty if one can."""
        return "" if self.is_paired else report.pair_problem(self.workers)

    def usable(self, role: WorkerRole) -> Sequence[Worker]:
        """Return the workers of this role that accept requests, with room or not."""
        return self._worker_set.holding(role)

    def num_prefill_places(self) -> int:
        """Return the number of prompts that the usable prefill workers hold together."""
        return sum(
            worker.info.max_running_requests
            for worker in self.usable(WorkerRole.PREFILL)
            if worker.info is not None
        )

    def status(self) -> list[generation_pb2.WorkerStatus]:
        """Return the status of every worker, for people."""
        return report.statuses(self.workers)

    def _on_change(self, worker: Worker) -> None:
        if self._worker_set.changed(worker):
            self._note_pairing()
        key = worker.role, worker.address
        if self._infos.get(key) is not worker.info:
            self._infos[key] = worker.info
            self._present = None
        self._wake()

    def _wake(self) -> None:
        """Wake the tasks that wait for a change."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def _note_pairing(self) -> None:
        """Update `is_paired` after the usable workers have changed."""
        sources, pools = (self._worker_set.tally.compatibilities(role) for role in WorkerRole)
        is_paired = any(may_pair(source, pool) for source in sources for pool in pools)
        if is_paired != self.is_paired:
            self._pairless_since_s = None if is_paired else self._clock.now()
            self._pairing_changed.set()
            self._pairing_changed = asyncio.Event()

    def _num_workers(self, role: WorkerRole, *, is_usable: bool) -> int:
        """Return the number of (un)usable workers of a role. Safe from any thread."""
        return sum(worker.role is role and worker.is_usable is is_usable for worker in self.workers)
