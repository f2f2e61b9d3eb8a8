"""Worker directory: known workers, usable workers, and the choice for each request.

Workers are configured or discovered (`router.workers.discovery`). Each is watched over one
`Worker.Watch` stream. A worker is usable while that stream is alive, reports that it serves, and
describes the router's model. A prefill and a decode worker form a pair if their compatibility
digests fit. A pair that recently failed a handoff is left out while another exists. Choosing a
worker books the request on it; the caller must release the booking.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import NamedTuple, TypeVar

import grpc

from protos import generation_pb2
from router.text.model_facts import ModelLimits
from router.workers import report
from router.workers.candidate import Candidate
from router.workers.discovery import DiscoveryOptions
from router.workers.failed_links import FailedLinks
from router.workers.policy import LinkedWorkers, Policy, PolicyContext, choose, choose_pair
from router.workers.prefix_index import PrefixIndex, RoutedPrompt
from router.workers.watch import MAX_BACKOFF_S, Follow, follow_stream, watch_worker
from router.workers.worker import Booking, Worker, WorkerRole
from router.workers.worker_set import WorkerSet, open_source
from runtime.clock import Clock, SystemClock
from runtime.digests import in_common, may_pair
from runtime.observe.metrics import RouterMetrics
from runtime.rpc.client import ChannelOptions, open_channel
from runtime.security.access import PLAIN_CHANNEL, ChannelSecurity, PeerRole

T = TypeVar("T")
Connect = Callable[[WorkerRole, str], grpc.aio.Channel]

# Workers of a role that a choice considers, plus as many of those with some of the prompt cached.
MOST_COMPARED = 64
START_MARGIN = 1.5  # a start takes longer under load, and its end is noticed late


@dataclass(frozen=True)
class WorkerPair:
    """A pair of workers for one request. The decode pool reserves only when prefill starts."""

    prefill: Booking
    decode: Booking

    def release(self) -> None:
        self.prefill.release()
        self.decode.release()


class _Linked(NamedTuple):
    """Prefill workers of one kind, each of which may feed each of these decode pools."""

    sources: list[Worker]
    pools: list[Worker]


class _Chosen(NamedTuple):
    """A chosen worker, with `num_cached` tokens of the prompt cached there."""

    worker: Worker
    num_cached: int


@dataclass(frozen=True)
class DirectoryOptions:
    """Options of a directory.

    `prefill` and `decode` are targets (`router.workers.discovery`), `watch_interval_s` is the
    interval of load reports, `longest_restart_s` the upper bound of `restart_estimate_s`.
    """

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    policy: Policy = Policy.PREFIX_CACHE
    watch_interval_s: float = 0.25
    security: ChannelSecurity = PLAIN_CHANNEL
    discovery: DiscoveryOptions = field(default_factory=DiscoveryOptions)
    longest_restart_s: float = 0.0


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
        self._turns = dict.fromkeys(WorkerRole, 0)
        self.index = PrefixIndex()  # prefix caches of prefill workers
        self._pool_index = PrefixIndex()  # prefix caches of decode pools
        self._changed: asyncio.Event | None = None  # None while no task waits for a change
        self._pairing_changed = asyncio.Event()
        self._infos: dict[tuple[WorkerRole, str], object] = {}  # latest info of each worker
        # (version of the set, tokens); None after a worker reported a new info.
        self._longest: tuple[int, int] | None = None
        self._pairless_since_s: float | None = self._clock.now()
        self._failed_links = FailedLinks(self._clock)
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
        self._policies = {
            WorkerRole.PREFILL: options.policy,
            WorkerRole.DECODE: options.policy.of_pools,
        }
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
            self._index_of(role),
            self._options.security.shown,
        )
        return worker

    def _index_of(self, role: WorkerRole) -> PrefixIndex:
        return self.index if role is WorkerRole.PREFILL else self._pool_index

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
    def max_context_tokens(self) -> int:
        """Return the capacity of the largest pair seen so far, in tokens of prompt plus completion.

        A pair that is away now may come back. Smaller workers get only requests that they can hold.
        """
        version = self._worker_set.version
        if self._longest is None or self._longest[0] != version:
            self._longest = version, self._largest_pair()
        return self._longest[1]

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
        usable = self._usable(WorkerRole.DECODE) if self.is_paired else ()
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

    def place(
        self, prompt: RoutedPrompt, context_tokens: int = 0, compatibility: str = ""
    ) -> WorkerPair | None:
        """Book a compatible pair that could take the request now or soon; return None if there is
        none.

        `context_tokens`, here and below, is the maximum length of the request, prompt plus
        completion: smaller workers are passed over. `compatibility` is the digest that both must
        fit; "" for any.
        """
        sources, pools = (
            self._fitting(role, compatibility, context_tokens)
            if compatibility
            else self._usable(role, context_tokens)
            for role in WorkerRole
        )
        if max(len(sources), len(pools)) > MOST_COMPARED:

            def fits(worker: Worker) -> bool:
                return worker.snapshot.longest >= context_tokens and (
                    not compatibility or may_pair(worker.snapshot.compatibility, compatibility)
                )

            pair = self._place_among(
                self._some(sources, prompt, fits),
                self._some(pools, prompt, fits),
                prompt,
                context_tokens,
            )
            if pair is not None:
                return pair
        return self._place_among(sources, pools, prompt, context_tokens)

    def _some(
        self, workers: Sequence[Worker], prompt: RoutedPrompt, fits: Callable[[Worker], bool]
    ) -> Sequence[Worker]:
        """Return the workers that a choice considers.

        Considering every worker of a large fleet would dominate the router's work. The least loaded
        of a random sample is hardly busier than the least loaded of the fleet. Workers with a part
        of the prompt cached are always added.
        """
        if (
            len(workers) <= MOST_COMPARED
            or not self._policies[workers[0].role].chooser.goes_by_load
        ):
            return workers
        role = workers[0].role
        some = {worker.address: worker for worker in self._rng.sample(workers, MOST_COMPARED)}
        for address in islice(self._cached(role, prompt), MOST_COMPARED):
            if address not in some:  # every worker has a part of a prompt with a common beginning
                holder = self._worker_set.find(role, address)
                if holder is not None and fits(holder):
                    some[address] = holder
        return list(some.values())

    def _place_among(
        self,
        sources: Sequence[Worker],
        pools: Sequence[Worker],
        prompt: RoutedPrompt,
        context_tokens: int,
    ) -> WorkerPair | None:
        num_tokens = prompt.num_tokens

        def with_room(workers: Sequence[Worker]) -> list[Worker]:
            return [
                worker for worker in workers if worker.snapshot.has_room(num_tokens, context_tokens)
            ]

        groups = [
            _Linked(with_room(group.sources), with_room(group.pools))
            for group in self._linked(sources, pools)
        ]
        return self._book_pair(groups, prompt, context_tokens)

    def awaits_prefill(self, num_tokens: int, context_tokens: int) -> bool:
        """Return whether decode pools have room for such a request, so that it only waits for
        prefill.
        """
        return any(
            worker.snapshot.has_room(num_tokens, context_tokens)
            for worker in self._usable(WorkerRole.DECODE, context_tokens)
        )

    def caches_with_room(self, num_tokens: int, context_tokens: int) -> list[str]:
        """Return the addresses of prefill workers with room for such a request, under
        `PREFIX_CACHE`.

        The list is empty under another policy or if no decode pool has room.
        """
        if self._options.policy is not Policy.PREFIX_CACHE or not self.awaits_prefill(
            num_tokens, context_tokens
        ):
            return []
        return [
            worker.address
            for worker in self._usable(WorkerRole.PREFILL, context_tokens)
            if worker.snapshot.has_room(num_tokens, context_tokens)
        ]

    def num_cached(self, prompt: RoutedPrompt) -> Mapping[str, int]:
        """Return the tokens of the prompt that prefill workers have cached, by address."""
        return self._cached(WorkerRole.PREFILL, prompt)

    def book_prefill(
        self, prompt: RoutedPrompt, pool: Booking, *, tried: frozenset[str], context_tokens: int = 0
    ) -> Booking | None:
        """Book a prefill worker for a request that lost its own and has its place in `pool`.

        The request goes before those in admission. A worker in `tried` is booked only if no other
        is left.
        """
        sources = self._fitting(WorkerRole.PREFILL, pool.compatibility, context_tokens)
        fitting = [
            worker
            for group in self._linked(sources, [pool.worker])
            if group.pools
            for worker in group.sources
            if worker.has_queue_place
        ]
        others = [worker for worker in fitting if worker.address not in tried]
        chosen = self._choose(others or fitting, prompt)
        return None if chosen is None else self._book(chosen, prompt, context_tokens)

    def book_decode(
        self,
        prompt: RoutedPrompt,
        compatibility: str,
        *,
        tried: frozenset[str],
        context_tokens: int = 0,
    ) -> Booking | None:
        """Book a decode pool not in `tried`, full or not: asking is cheap and reports are late."""
        fitting = self._fitting(WorkerRole.DECODE, compatibility, context_tokens)
        chosen = self._choose(fitting, prompt, tried, source=compatibility)
        return None if chosen is None else self._book(chosen, prompt, context_tokens)

    def place_again(
        self, prompt: RoutedPrompt, compatibility: str, lost: str, context_tokens: int = 0
    ) -> WorkerPair | None:
        """Book a pair for a request whose decode pool, at address `lost`, gave it up.

        The same pool is booked only if it is usable again and no other is.
        """
        sources = [
            worker
            for worker in self._fitting(WorkerRole.PREFILL, compatibility, context_tokens)
            if worker.has_queue_place
        ]
        pools = self._usable(WorkerRole.DECODE, context_tokens)
        others = [worker for worker in pools if worker.address != lost]
        return self._book_pair(
            self._linked(sources, others), prompt, context_tokens
        ) or self._book_pair(self._linked(sources, pools), prompt, context_tokens)

    def failed_links(self, source: Booking, pool: Booking) -> None:
        """Record a failed handoff between live workers: other pairs go first for a while, or until
        one succeeds.
        """
        self._failed_links.add(source.incarnation, pool.incarnation)

    def linked(self, source: Booking, pool: Booking, waited_s: float) -> None:
        """Record a successful handoff. `waited_s`: time from the first token until all pages had
        landed.
        """
        self._failed_links.remove(source.incarnation, pool.incarnation)
        pool.record_handoff(waited_s)

    def is_fed(self, pool: Booking, context_tokens: int = 0) -> bool:
        """Return whether a prompt for this pool has a source, or no pool has one."""
        groups = self._linked(
            *(self._fitting(role, pool.compatibility, context_tokens) for role in WorkerRole)
        )
        fed = [worker for group in groups for worker in group.pools]
        return not fed or pool.worker in fed

    def has_pair(self, compatibility: str, context_tokens: int = 0) -> bool:
        """Return whether fitting workers of both roles are alive, with room or not."""
        return all(self._fitting(role, compatibility, context_tokens) for role in WorkerRole)

    def has_decode(self, compatibility: str, context_tokens: int = 0) -> bool:
        """Return whether a fitting decode pool is alive, with room or not."""
        return bool(self._fitting(WorkerRole.DECODE, compatibility, context_tokens))

    def can_hold(self, context_tokens: int) -> bool:
        """Return whether some live pair is large enough, with room or not."""
        sources = {
            worker.compatibility for worker in self._usable(WorkerRole.PREFILL, context_tokens)
        }
        return any(self._fitting(WorkerRole.DECODE, digest, context_tokens) for digest in sources)

    def num_missing(self, prompt: RoutedPrompt) -> int:
        """Return the prompt tokens left to compute on the prefill worker with most of the prompt
        cached.
        """
        usable = self._worker_set.usable[WorkerRole.PREFILL].addresses
        cached = self._cached(WorkerRole.PREFILL, prompt)
        return prompt.num_tokens - max(
            [num_cached for address, num_cached in cached.items() if address in usable], default=0
        )

    def usable(self, role: WorkerRole) -> Sequence[Worker]:
        """Return the workers of this role that accept requests, with room or not."""
        return self._usable(role)

    def status(self) -> list[generation_pb2.WorkerStatus]:
        """Return the status of every worker, for people."""
        return report.statuses(self.workers)

    def _linked(self, sources: Sequence[Worker], pools: Sequence[Worker]) -> list[_Linked]:
        """Return which sources may feed which pools; failed links only if no source has another
        pool.
        """
        pools_alike = _by_compatibility(pools)
        groups = [
            _Linked(
                alike,
                [
                    pool
                    for other, found in pools_alike.items()
                    if may_pair(digest, other)
                    for pool in found
                ],
            )
            for digest, alike in _by_compatibility(sources).items()
        ]
        if not len(self._failed_links):
            return groups
        sound = [part for group in groups for part in self._without_failed_links(group)]
        return sound if any(part.pools for part in sound) else groups

    def _without_failed_links(self, group: _Linked) -> list[_Linked]:
        """Split a group by failed links: each source with one gets its own list of pools."""
        failed_links = self._failed_links.by_source()
        whole = [source for source in group.sources if source.incarnation not in failed_links]
        parts = [
            _Linked(
                [source],
                [
                    pool
                    for pool in group.pools
                    if pool.incarnation not in failed_links[source.incarnation]
                ],
            )
            for source in group.sources
            if source.incarnation in failed_links
        ]
        return [_Linked(whole, group.pools), *parts] if whole else parts

    def _book_pair(
        self, linked: Sequence[_Linked], prompt: RoutedPrompt, context_tokens: int
    ) -> WorkerPair | None:
        """Book one source and one of its pools, full or not.

        Both are chosen before either is booked. Releasing a booking wakes requests that wait for
        room, and two such requests would wake each other forever.
        """
        groups = [group for group in linked if group.sources and group.pools]
        if not groups:
            return None
        with self._metrics.pick_s.time():
            context = self._policy_context(
                [source for group in groups for source in group.sources], prompt
            )
            candidates = [
                LinkedWorkers(
                    _candidates(group.sources),
                    _candidates(group.pools),
                    self._policy_context(
                        group.pools, prompt, source=group.sources[0].compatibility
                    ),
                )
                for group in groups
            ]
            chosen = choose_pair(self._policies[WorkerRole.PREFILL], candidates, context)
        sources, pools = groups[chosen.group]
        source = _named(sources, chosen.source, context)
        pool = _named(pools, chosen.pool, candidates[chosen.group].context)
        return WorkerPair(
            self._book(source, prompt, context_tokens), self._book(pool, prompt, context_tokens)
        )

    def _book(self, chosen: _Chosen, prompt: RoutedPrompt, context_tokens: int) -> Booking:
        role = chosen.worker.role
        self._metrics.decisions.labels(self._policies[role].value, "chosen").inc()
        self._turns[role] += 1
        if self.index.listener is not None and role is WorkerRole.PREFILL:
            snapshot = chosen.worker.snapshot
            self.index.listener.placed(prompt, snapshot.page_size, snapshot.compatibility)
        return chosen.worker.book(prompt.num_tokens, context_tokens, chosen.num_cached)

    def _choose(
        self,
        workers: Sequence[Worker],
        prompt: RoutedPrompt,
        tried: frozenset[str] = frozenset(),
        source: str = "",
    ) -> _Chosen | None:
        """Return the worker that the policy of the role selects, full or not. Books nothing.

        `source`: digest of the prefill worker that would send the prompt to a decode pool.
        """
        if not workers:
            return None
        policy = self._policies[workers[0].role]
        with self._metrics.pick_s.time():
            context = self._policy_context(workers, prompt, source)
            chosen = choose(policy, _candidates(workers), context, tried=tried)
        if chosen is None:
            self._metrics.decisions.labels(policy.value, "full").inc()
            return None
        return _named(workers, chosen, context)

    def _policy_context(
        self, workers: Sequence[Worker], prompt: RoutedPrompt, source: str = ""
    ) -> PolicyContext:
        """Return the inputs for a choice among workers of one role."""
        role = workers[0].role
        return PolicyContext(
            self._turns[role], self._rng, prompt.token_ids, self._cached(role, prompt, source)
        )

    def _cached(self, role: WorkerRole, prompt: RoutedPrompt, source: str = "") -> dict[str, int]:
        """Return the prompt tokens that workers have in their prefix caches, by address.

        Of workers of one kind, the one with most comes first.
        """
        index = self._index_of(role)
        kinds = {
            (page_size, in_common(compatibility, source or compatibility))
            for page_size, compatibility in self._worker_set.usable[role].block_kinds
        }
        return {
            address: depth * page_size
            for page_size, compatibility in kinds
            for address, depth in index.depths(prompt.block_names(page_size, compatibility)).items()
        }

    def _fitting(
        self, role: WorkerRole, compatibility: str, context_tokens: int = 0
    ) -> list[Worker]:
        return [
            worker
            for worker in self._usable(role, context_tokens)
            if may_pair(worker.snapshot.compatibility, compatibility)
        ]

    def _usable(self, role: WorkerRole, context_tokens: int = 0) -> Sequence[Worker]:
        usable = self._worker_set.usable[role]
        if context_tokens <= usable.shortest:
            return usable.workers
        return [worker for worker in usable.workers if worker.snapshot.longest >= context_tokens]

    def _on_change(self, worker: Worker) -> None:
        if self._worker_set.changed(worker):
            self._note_pairing()
        key = worker.role, worker.address
        if self._infos.get(key) is not worker.info:
            self._infos[key] = worker.info
            self._longest = None
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


# All workers are looked at for every choice.
_compatibility = attrgetter("snapshot.compatibility")
_candidate = attrgetter("snapshot.candidate")


def _by_compatibility(workers: Sequence[Worker]) -> dict[str, list[Worker]]:
    """Group workers by compatibility, in the order of their first workers."""
    digests = dict.fromkeys(map(_compatibility, workers))
    if len(digests) == 1:
        return {digest: list(workers) for digest in digests}
    return {
        digest: [worker for worker in workers if worker.snapshot.compatibility == digest]
        for digest in digests
    }


def _candidates(workers: Iterable[Worker]) -> list[Candidate]:
    return list(map(_candidate, workers))


def _named(workers: Iterable[Worker], chosen: Candidate, context: PolicyContext) -> _Chosen:
    """Return the chosen worker and its number of cached prompt tokens."""
    return _Chosen(
        next(worker for worker in workers if worker.address == chosen.address),
        context.num_cached.get(chosen.address, 0),
    )
