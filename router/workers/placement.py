"""The choice of workers for a request, and what failed handoffs say about them.

A prefill and a decode worker form a pair if their compatibility digests fit. A pair that recently
failed a handoff is left out while another exists. Choosing a worker books the request on it; the
caller must release the booking.
"""

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from router.workers.adapters import has_adapter, with_adapter_loaded
from router.workers.cache_view import CacheView
from router.workers.candidate import Candidate
from router.workers.holders import BlockHolders, Cached, HeldBlocks, read_from_tiers
from router.workers.links import FailedLinks, Linked, linked
from router.workers.packing import decode_place, weighed_sources
from router.workers.placement_request import PlacementRequest, WorkerPair
from router.workers.policies import PolicyContext
from router.workers.policy import LinkedWorkers, Policy, choose, choose_pair
from router.workers.prefix_index import RoutedPrompt
from router.workers.worker import Booking, Worker, WorkerRole
from router.workers.worker_set import WorkerSet
from runtime.clock import Clock
from runtime.observe.metrics.router import RouterMetrics

# Workers of a role that a choice considers, plus as many of those with some of the prompt cached.
MOST_COMPARED = 64


class _Chosen(NamedTuple):
    """A chosen worker, with `num_cached` tokens of the prompt cached there.

    What it reads or pulls besides saves as much as `num_brought` cached tokens.
    """

    worker: Worker
    num_cached: int
    num_brought: int = 0


class WorkerPlacement:
    """Choices among the workers of one directory."""

    def __init__(
        self,
        workers: WorkerSet,
        caches: CacheView,
        policy: Policy,
        metrics: RouterMetrics,
        rng: random.Random,
        clock: Clock,
        pull_tokens: int = 0,
    ) -> None:
        self._workers = workers
        self._holders = BlockHolders(workers, pull_tokens)
        self._caches = caches
        self._policy = policy
        self._policies = {WorkerRole.PREFILL: policy, WorkerRole.DECODE: policy.of_pools}
        self._metrics = metrics
        self._rng = rng
        self._turns = dict.fromkeys(WorkerRole, 0)
        self.placed: Counter[tuple[str, str]] = Counter()  # requests by kind and reason
        self._failed_links = FailedLinks(clock)

    def place(self, request: PlacementRequest) -> WorkerPair | None:
        """Book a compatible pair that could take the request now or soon; return None if there is
        none.
        """
        sources, pools = (self._fitting(role, request) for role in WorkerRole)
        if max(len(sources), len(pools)) > MOST_COMPARED:
            pair = self._place_among(
                self._some(sources, request), self._some(pools, request), request
            )
            if pair is not None:
                return pair
        return self._place_among(sources, pools, request)

    def _some(self, workers: Sequence[Worker], request: PlacementRequest) -> Sequence[Worker]:
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
        for address in self._with_most(role, request.prompt):
            if address not in some:  # every worker has a part of a prompt with a common beginning
                holder = self._workers.find(role, address)
                if holder is not None and request.fits(holder):
                    some[address] = holder
        return list(some.values())

    def _with_most(self, role: WorkerRole, prompt: RoutedPrompt) -> Iterable[str]:
        """Return the addresses of workers with a part of the prompt in memory, and in own tiers."""
        yield from islice(self._cached(role, prompt), MOST_COMPARED)
        if role is WorkerRole.PREFILL:
            copied = self._caches.copied(self._workers.usable[role], prompt)
            yield from islice(copied, MOST_COMPARED)

    def _place_among(
        self, sources: Sequence[Worker], pools: Sequence[Worker], request: PlacementRequest
    ) -> WorkerPair | None:
        groups = [
            Linked(self._ready(group.sources, request), self._ready(group.pools, request))
            for group in self._linked(sources, pools)
        ]
        return self._book_pair(groups, request)

    @staticmethod
    def _ready(workers: Sequence[Worker], request: PlacementRequest) -> Sequence[Worker]:
        """Return the workers with room, only those with the adapter in memory if there are any."""
        found = list(filter(request.has_room, workers))
        adapter = request.prompt.adapter
        return with_adapter_loaded(found, adapter) if adapter else found

    def awaits_prefill(self, request: PlacementRequest) -> bool:
        """Return whether decode pools have room for the request, so that it only waits for prefill."""
        holding = self._any_kind(WorkerRole.DECODE, request)
        return any(map(request.has_room, holding))

    def caches_with_room(self, request: PlacementRequest) -> list[str]:
        """Return the addresses of prefill workers with room for the request, under `PREFIX_CACHE`.

        The list is empty under another policy or if no decode pool has room.
        """
        if self._policy is not Policy.PREFIX_CACHE or not self.awaits_prefill(request):
            return []
        holding = self._any_kind(WorkerRole.PREFILL, request)
        return [worker.address for worker in filter(request.has_room, holding)]

    def num_cached(self, prompt: RoutedPrompt) -> Mapping[str, int]:
        """Return the tokens of the prompt that prefill workers have cached, by address.

        Those in their own tiers count less.
        """
        usable = self._workers.usable[WorkerRole.PREFILL]
        return self._held(self._cached(WorkerRole.PREFILL, prompt), prompt, usable.workers).worth

    def num_missing(self, prompt: RoutedPrompt) -> int:
        """Return the prompt tokens to compute on the prefill worker with most of it cached."""
        usable = self._workers.usable[WorkerRole.PREFILL].addresses
        cached = self.num_cached(prompt).items()
        return prompt.num_tokens - max([num for at, num in cached if at in usable], default=0)

    def book_prefill(
        self, request: PlacementRequest, pool: Booking, tried: frozenset[str]
    ) -> Booking | None:
        """Book a prefill worker for a request that lost its own and has its place in `pool`.

        The request goes before those in admission. A worker in `tried` is booked only if no other
        is left. The same holds for the pool's own worker if it serves both roles: no prompt is
        handed over within a worker, so the pool would give its place up.
        """
        sources = self._fitting(WorkerRole.PREFILL, request.of_kind(pool.compatibility))
        fitting = [
            worker
            for group in self._linked(sources, [pool.worker])
            if group.pools
            for worker in group.sources
            if worker.has_queue_place
        ]
        last = tried | {pool.worker.address}
        others = [worker for worker in fitting if worker.address not in last]
        chosen = self._choose(others or fitting, request.prompt)
        return None if chosen is None else self._book(chosen, request)

    def book_decode(self, request: PlacementRequest, tried: frozenset[str]) -> Booking | None:
        """Book a decode pool not in `tried`, full or not: asking is cheap and reports are late."""
        fitting = self._fitting(WorkerRole.DECODE, request)
        chosen = self._choose(fitting, request.prompt, tried, source=request.compatibility)
        return None if chosen is None else self._book(chosen, request)

    def place_again(self, request: PlacementRequest, lost: str) -> WorkerPair | None:
        """Book a pair for a request whose decode pool, at address `lost`, gave it up.

        The same pool is booked only if it is usable again and no other is.
        """
        sources = [
            worker
            for worker in self._fitting(WorkerRole.PREFILL, request)
            if worker.has_queue_place
        ]
        pools = self._any_kind(WorkerRole.DECODE, request)
        others = [worker for worker in pools if worker.address != lost]
        return self._book_pair(self._linked(sources, others), request) or self._book_pair(
            self._linked(sources, pools), request
        )

    def failed_link(self, source: Booking, pool: Booking) -> None:
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

    def is_fed(self, request: PlacementRequest, pool: Booking) -> bool:
        """Return whether the request has a source for this pool, or no pool has one."""
        alike = request.of_kind(pool.compatibility)
        groups = self._linked(*(self._fitting(role, alike) for role in WorkerRole))
        fed = [worker for group in groups for worker in group.pools]
        return not fed or pool.worker in fed

    def has_pair(self, request: PlacementRequest) -> bool:
        """Return whether fitting workers of both roles are alive, with room or not."""
        return all(self._fitting(role, request) for role in WorkerRole)

    def has_decode(self, request: PlacementRequest) -> bool:
        """Return whether a fitting decode pool is alive, with room or not."""
        return bool(self._fitting(WorkerRole.DECODE, request))

    def passing(self, request: PlacementRequest, too_large: float) -> float | None:
        """Return how long requests must not be to pass one that finds no pair; None: none may pass.

        `too_large` is the present limit in context tokens. It stays for a request whose adapter
        usable workers lack: others may go to these.
        """
        adapter = request.prompt.adapter
        if adapter and not all(
            has_adapter(worker, adapter)
            for role in WorkerRole
            for worker in self._workers.usable[role].workers
        ):
            return too_large
        return None if self.can_hold(request) else request.context_tokens

    def can_hold(self, request: PlacementRequest) -> bool:
        """Return whether some live pair is large enough, with room or not."""
        sources = self._any_kind(WorkerRole.PREFILL, request)
        digests = {worker.compatibility for worker in sources}
        return any(self._fitting(WorkerRole.DECODE, request.of_kind(digest)) for digest in digests)

    def _linked(self, sources: Sequence[Worker], pools: Sequence[Worker]) -> list[Linked]:
        return linked(sources, pools, self._failed_links)

    def _book_pair(self, groups: Sequence[Linked], request: PlacementRequest) -> WorkerPair | None:
        """Book one source and one of its pools, full or not.

        Both are chosen before either is booked. Releasing a booking wakes requests that wait for
        room, and two such requests would wake each other forever.
        """
        groups = [group for group in groups if group.sources and group.pools]
        if not groups:
            return None
        num_tokens = request.prompt.num_tokens
        with self._metrics.pick_s.time():
            every_source = [source for group in groups for source in group.sources]
            context = self._policy_context(every_source, request.prompt)
            candidates = [
                LinkedWorkers(
                    weighed_sources(_candidates(group.sources), group.pools, num_tokens),
                    _candidates(group.pools),
                    self._policy_context(
                        group.pools, request.prompt, source=group.sources[0].compatibility
                    ),
                )
                for group in groups
            ]
            held = self._held(context.num_cached, request.prompt, every_source)
            if num_tokens > self._holders.least_tokens > 0:  # else there is nothing to pull
                in_pools = [(WorkerRole.DECODE, each.context.num_cached) for each in candidates]
                by_role = [(WorkerRole.PREFILL, context.num_cached), *in_pools]
                held = self._holders.with_pulls(held, by_role, every_source)
            weighed = replace(context, num_cached=held.worth)
            chosen = choose_pair(self._policies[WorkerRole.PREFILL], candidates, weighed)
        sources, pools = groups[chosen.group]
        source = _worker_of(sources, chosen.source)
        of_pools = candidates[chosen.group].context.num_cached
        place = decode_place(source, _worker_of(pools, chosen.pool), pools, num_tokens)
        self._metrics.placements.labels(place.kind, place.why).inc()
        self.placed[place.kind, place.why] += 1
        pair = WorkerPair(
            self._book(_chosen(source, context.num_cached, held.worth), request),
            self._book(_chosen(place.pool, of_pools, of_pools), request),
        )
        if held.ranked:
            pair.prefill.holder = self._holders.best(held, source)
            pair.decode.holder = pair.prefill.holder if pair.is_aggregated else None
        return pair

    def _book(self, chosen: _Chosen, request: PlacementRequest) -> Booking:
        role = chosen.worker.role
        self._metrics.decisions.labels(self._policies[role].value, "chosen").inc()
        self._turns[role] += 1
        self._caches.placed(request.prompt, chosen.worker)
        return chosen.worker.book(
            request.prompt.num_tokens,
            request.context_tokens,
            chosen.num_cached,
            chosen.num_brought,
        )

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
            worth = context.num_cached
            if workers[0].role is WorkerRole.PREFILL:
                worth = self._held(worth, prompt, workers).worth
            weighed = replace(context, num_cached=worth)
            chosen = choose(policy, _candidates(workers), weighed, tried=tried)
        if chosen is None:
            self._metrics.decisions.labels(policy.value, "full").inc()
            return None
        return _chosen(_worker_of(workers, chosen), context.num_cached, worth)

    def _policy_context(
        self, workers: Sequence[Worker], prompt: RoutedPrompt, source: str = ""
    ) -> PolicyContext:
        """Return the inputs for a choice among workers of one role."""
        role = workers[0].role
        return PolicyContext(
            self._turns[role], self._rng, prompt.token_ids, self._cached(role, prompt, source)
        )

    def _held(self, cached: Cached, prompt: RoutedPrompt, sources: Iterable[Worker]) -> HeldBlocks:
        """Return what prefill workers have of a prompt, in memory, as `cached`, and in own tiers."""
        usable = self._workers.usable[WorkerRole.PREFILL]
        copied = self._caches.copied(usable, prompt)
        return read_from_tiers(cached, copied, sources) if copied else HeldBlocks(cached, cached)

    def _cached(self, role: WorkerRole, prompt: RoutedPrompt, source: str = "") -> dict[str, int]:
        return self._caches.cached(role, self._workers.usable[role], prompt, source)

    def _any_kind(self, role: WorkerRole, request: PlacementRequest) -> Sequence[Worker]:
        """Return the workers that fit but for their digest."""
        return self._fitting(role, request.of_kind(""))

    def _fitting(self, role: WorkerRole, request: PlacementRequest) -> Sequence[Worker]:
        holding = self._workers.holding(role, request.context_tokens)
        if not request.compatibility and not request.prompt.adapter:
            return holding
        return [worker for worker in holding if request.fits(worker)]


# All workers are looked at for every choice.
_candidate = attrgetter("snapshot.candidate")


def _candidates(workers: Iterable[Worker]) -> list[Candidate]:
    return list(map(_candidate, workers))


def _worker_of(workers: Iterable[Worker], chosen: Candidate) -> Worker:
    return next(worker for worker in workers if worker.address == chosen.address)


def _chosen(worker: Worker, cached: Cached, worth: Cached) -> _Chosen:
    """Return a chosen worker with its cached prompt tokens, and what it brings besides."""
    num_cached = cached.get(worker.address, 0)
    return _Chosen(worker, num_cached, worth.get(worker.address, 0) - num_cached)
