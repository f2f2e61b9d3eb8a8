"""Which workers there are, which can be used, and which gets the next request.

Workers are named to the router or found (`router.workers.discovery`). Each is watched over one
`Worker.Watch` stream. A worker is usable while that stream is alive, reports that it serves, and
describes the router's model. A prefill and a decode worker are a pair if their compatibility
digests fit; one that lately could not hand over is left out while there is another. Choosing a
worker books the request on it; the caller must release it.
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
from router.workers.discovery import DiscoveryOptions
from router.workers.policy import (
    Candidate,
    FailedLinks,
    LinkedWorkers,
    Policy,
    PolicyContext,
    choose,
    choose_pair,
)
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

# workers of a role that a choice looks at, and as many of those that have some of the prompt
MOST_COMPARED = 64
START_MARGIN = 1.5  # a start takes longer under load, and its end is noticed later


@dataclass(frozen=True)
class WorkerPair:
    """A pair of workers for one request. The decode pool reserves only when prefill starts."""

    prefill: Booking
    decode: Booking

    def release(self) -> None:
        self.prefill.release()
        self.decode.release()


class _Linked(NamedTuple):
    """Prefill workers that are alike, each of which may feed each of these decode pools."""

    sources: list[Worker]
    pools: list[Worker]


class _Chosen(NamedTuple):
    """For a prompt, `num_held` tokens of which are there."""

    worker: Worker
    num_held: int


@dataclass(frozen=True)
class DirectoryOptions:
    """Targets (`router.workers.discovery`), how often workers report, and the most that is expected
    of `restart_estimate_s`."""

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    policy: Policy = Policy.PREFIX_CACHE
    watch_interval_s: float = 0.25
    security: ChannelSecurity = PLAIN_CHANNEL
    discovery: DiscoveryOptions = field(default_factory=DiscoveryOptions)
    longest_restart_s: float = 0.0


class Directory:
    """Workers of one model. Build inside a running event loop; `run` watches until it is
    cancelled."""

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
        """`connect` opens the channels to workers; by default over the network, as `options` say.
        `follow` brings their reports."""
        self._options = options
        self._clock = clock or SystemClock()
        self._connect = connect or self._open_channel
        self._follow = follow
        self._facts = facts
        self._metrics = metrics
        self._rng = rng
        self._turns = dict.fromkeys(WorkerRole, 0)
        self.index = PrefixIndex()  # of what prefill workers have
        self._pool_index = PrefixIndex()  # of what need not be sent to decode pools
        self._changed: asyncio.Event | None = None  # of those that wait for one, if anybody does
        self._pairing_changed = asyncio.Event()
        self._infos: dict[
            tuple[WorkerRole, str], object
        ] = {}  # what each worker said of itself last
        self._longest: tuple[int, int] | None = (
            None  # as of this version of the set, until a worker says otherwise
        )
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
        """Find and watch every worker."""
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
        """Call `attempt` now and after every change, until it gives something."""
        while (result := attempt()) is None:
            await self.changed()
        return result

    async def until_paired(self, *, is_paired: bool) -> None:
        """Return when some workers can serve together, or none can any more. Bookings and reports
        wake nobody here."""
        while self.is_paired is not is_paired:
            await self._pairing_changed.wait()

    @property
    def max_context_tokens(self) -> int:
        """What the largest pair of workers seen so far can hold, prompt plus completion: one that
        is away now may come back. Smaller ones get what they can hold."""
        version = self._worker_set.version
        if self._longest is None or self._longest[0] != version:
            self._longest = version, self._largest_pair()
        return self._longest[1]

    def _largest_pair(self) -> int:
        largest: dict[WorkerRole, dict[str, int]] = {
            role: {} for role in WorkerRole
        }  # by compatibility
        for worker in self.workers:
            if (num_tokens := worker.max_context_tokens) is not None:
                known = largest[worker.role]
                known[worker.compatibility] = max(num_tokens, known.get(worker.compatibility, 0))
        prefill, decode = largest[WorkerRole.PREFILL], largest[WorkerRole.DECODE]
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
        """How long a worker that is lost may take to be back, by the slowest of the last starts."""
        return min(
            START_MARGIN * self._worker_set.tally.slowest_start_s, self._options.longest_restart_s
        )

    @property
    def revision(self) -> str:
        """Digest of the weights, as the workers of a pair state it; empty while there is none."""
        usable = self._usable(WorkerRole.DECODE) if self.is_paired else ()
        return next((worker.info.revision for worker in usable if worker.info is not None), "")

    def refusal(self) -> str:
        """What a client reads where no pair can serve; empty if one can."""
        return "" if self.is_paired else report.refusal(self.workers)

    @property
    def is_paired(self) -> bool:
        """Whether some prefill and decode worker can serve together."""
        return self._pairless_since_s is None

    @property
    def pairless_s(self) -> float:
        """For how long none could; 0 while some can."""
        return 0.0 if self._pairless_since_s is None else self._clock.now() - self._pairless_since_s

    def pair_problem(self) -> str:
        """Why no prefill and decode worker can serve together, for operators; empty if some can."""
        return "" if self.is_paired else report.pair_problem(self.workers)

    def place(
        self, prompt: RoutedPrompt, context_tokens: int = 0, compatibility: str = ""
    ) -> WorkerPair | None:
        """Book a compatible pair that could take the request now or soon; None if there is none.
        `context_tokens`, here and below, is what the request may come to, prompt plus completion:
        smaller workers are passed over. `compatibility`: what both must fit; "" for any."""
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
        """Those that a choice looks at. To look at all of many would be most of what a router does,
        and the least loaded of some drawn at random is hardly busier than the least loaded of all;
        but whoever has a part of the prompt is not left to chance."""
        if len(workers) <= MOST_COMPARED or not self._policies[workers[0].role].goes_by_load:
            return workers
        role = workers[0].role
        some = {worker.address: worker for worker in self._rng.sample(workers, MOST_COMPARED)}
        for address in islice(self._num_held(role, prompt), MOST_COMPARED):
            if address not in some:  # of a prompt that begins as all do every worker has a part
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
        """Whether decode pools have room for such a request, and all that it waits for is
        prefill."""
        return any(
            worker.snapshot.has_room(num_tokens, context_tokens)
            for worker in self._usable(WorkerRole.DECODE, context_tokens)
        )

    def caches_with_room(self, num_tokens: int, context_tokens: int) -> list[str]:
        """Addresses of the prefill workers that have room for such a request, where caches decide
        who gets one and a decode pool has room, too; else none."""
        if self._options.policy is not Policy.PREFIX_CACHE or not self.awaits_prefill(
            num_tokens, context_tokens
        ):
            return []
        return [
            worker.address
            for worker in self._usable(WorkerRole.PREFILL, context_tokens)
            if worker.snapshot.has_room(num_tokens, context_tokens)
        ]

    def num_held(self, prompt: RoutedPrompt) -> Mapping[str, int]:
        """Tokens of the prompt that prefill workers have in their caches, by address."""
        return self._num_held(WorkerRole.PREFILL, prompt)

    def book_prefill(
        self, prompt: RoutedPrompt, pool: Booking, *, tried: frozenset[str], context_tokens: int = 0
    ) -> Booking | None:
        """A prefill worker for a request that lost its own and has its place in `pool`; it goes
        before those held back. One that was tried only if there is no other."""
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
        """A decode pool that was not tried, full or not: asking is cheap and reports are late."""
        fitting = self._fitting(WorkerRole.DECODE, compatibility, context_tokens)
        chosen = self._choose(fitting, prompt, tried, source=compatibility)
        return None if chosen is None else self._book(chosen, prompt, context_tokens)

    def place_again(
        self, prompt: RoutedPrompt, compatibility: str, lost: str, context_tokens: int = 0
    ) -> WorkerPair | None:
        """A pair for a request whose decode pool, at address `lost`, gave it up; the same pool only
        if it is usable again and there is no other."""
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
        """A handoff failed though both live: until one succeeds, or for a while, other pairs go
        first."""
        self._failed_links.add(source.incarnation, pool.incarnation)

    def linked(self, source: Booking, pool: Booking, waited_s: float) -> None:
        """A handoff succeeded; the first token was there for so long before everything else was."""
        self._failed_links.remove(source.incarnation, pool.incarnation)
        pool.landed(waited_s)

    def is_fed(self, pool: Booking, context_tokens: int = 0) -> bool:
        """Whether a prompt for this pool has a source to come from; also where no pool has."""
        groups = self._linked(
            *(self._fitting(role, pool.compatibility, context_tokens) for role in WorkerRole)
        )
        fed = [worker for group in groups for worker in group.pools]
        return not fed or pool.worker in fed

    def has_pair(self, compatibility: str, context_tokens: int = 0) -> bool:
        """Whether workers of both roles that fit are alive, with room or without."""
        return all(self._fitting(role, compatibility, context_tokens) for role in WorkerRole)

    def has_decode(self, compatibility: str, context_tokens: int = 0) -> bool:
        """Whether a decode pool that fits is alive, with room or without."""
        return bool(self._fitting(WorkerRole.DECODE, compatibility, context_tokens))

    def can_hold(self, context_tokens: int) -> bool:
        """Whether some pair that is alive is large enough, with room or without."""
        sources = {
            worker.compatibility for worker in self._usable(WorkerRole.PREFILL, context_tokens)
        }
        return any(self._fitting(WorkerRole.DECODE, digest, context_tokens) for digest in sources)

    def num_missing(self, prompt: RoutedPrompt) -> int:
        """Tokens of the prompt that have to be computed where most of it is, by what prefill
        workers reported."""
        usable, held = (
            self._worker_set.usable[WorkerRole.PREFILL].addresses,
            self._num_held(WorkerRole.PREFILL, prompt),
        )
        return prompt.num_tokens - max(
            [num_held for address, num_held in held.items() if address in usable], default=0
        )

    def usable(self, role: WorkerRole) -> Sequence[Worker]:
        """Workers of this role that requests can be given to, with room or without."""
        return self._usable(role)

    def status(self) -> list[generation_pb2.WorkerStatus]:
        """Every worker, for people."""
        return report.statuses(self.workers)

    def _linked(self, sources: Sequence[Worker], pools: Sequence[Worker]) -> list[_Linked]:
        """Which sources may feed which pools: failed links only where no source has another
        pool."""
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
        """Without failed links: a source that is part of one has pools of its own."""
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
        """One of the sources and one of its pools, full or not. Both are chosen before either is
        booked: a booking that is given back wakes those that wait for room, and two of those would
        wake each other for ever."""
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
        source, pool = (
            _named(sources, chosen.source, context),
            _named(pools, chosen.pool, candidates[chosen.group].context),
        )
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
        return chosen.worker.book(prompt.num_tokens, context_tokens, chosen.num_held)

    def _choose(
        self,
        workers: Sequence[Worker],
        prompt: RoutedPrompt,
        tried: frozenset[str] = frozenset(),
        source: str = "",
    ) -> _Chosen | None:
        """Whom the policy of their role would pick, full or not; nothing is booked. `source`: the
        digest of the prefill worker that a decode pool is to be sent the prompt by."""
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
        """For a choice among workers of one role."""
        role = workers[0].role
        return PolicyContext(
            self._turns[role], self._rng, prompt.token_ids, self._num_held(role, prompt, source)
        )

    def _num_held(self, role: WorkerRole, prompt: RoutedPrompt, source: str = "") -> dict[str, int]:
        """Tokens of the prompt that workers have in their prefix caches, by address; of those that
        are alike, who has most comes first."""
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
            self._infos[key], self._longest = worker.info, None
        self._wake()

    def _wake(self) -> None:
        """Those that wait for a change."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def _note_pairing(self) -> None:
        """Other workers are usable than before."""
        sources, pools = (self._worker_set.tally.compatibilities(role) for role in WorkerRole)
        is_paired = any(may_pair(source, pool) for source in sources for pool in pools)
        if is_paired != self.is_paired:
            self._pairless_since_s = None if is_paired else self._clock.now()
            self._pairing_changed.set()
            self._pairing_changed = asyncio.Event()

    def _num_workers(self, role: WorkerRole, *, is_usable: bool) -> int:
        """Any thread."""
        return sum(worker.role is role and worker.is_usable is is_usable for worker in self.workers)


# All workers are looked at for every choice.
_compatibility = attrgetter("snapshot.compatibility")
_candidate = attrgetter("snapshot.candidate")


def _by_compatibility(workers: Sequence[Worker]) -> dict[str, list[Worker]]:
    """In the order of their first workers."""
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
    """The worker that was chosen."""
    return _Chosen(
        next(worker for worker in workers if worker.address == chosen.address),
        context.num_held.get(chosen.address, 0),
    )
