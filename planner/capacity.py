"""What splits of a fleet could serve within its promise, by the present estimates. Pure."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from baton.load import Slo
from planner.estimates import FleetEstimates
from planner.fleet_view import BOTH, ONLY_DECODE, ONLY_PREFILL, FleetView, WorkerView

DRAIN_S = 10.0  # in which a backlog should be computed
LEAST_USE, MOST_USE = 0.3, 0.95  # of prefill workers; the least is aimed at even if it is too much
MOST_PAGES = 0.9  # share of a worker's pages that may be promised
BESIDE = (0.2, 0.4, 0.6, 0.8, 1.0)  # considered shares of the most that prefill may use
LEAST_REQUESTS = 0.1  # on a worker that keeps the promise for none
HALVINGS = 12
SLOW = 0.8  # share of the promised time per token
EVEN_REQUESTS = 8  # of a load whose mix counts for half


@dataclass(frozen=True)
class RoleSplit:
    """Numbers of workers that only prefill, only decode, and do both."""

    prefill: int
    decode: int
    both: int = 0

    @classmethod
    def of(cls, workers: Sequence[WorkerView]) -> "RoleSplit":
        """Return the split of these workers."""
        active = [worker.active for worker in workers]
        return cls(*(active.count(roles) for roles in (ONLY_PREFILL, ONLY_DECODE, BOTH)))

    def num_changes(self, other: "RoleSplit") -> int:
        """Return how many workers change their roles from one split to the other."""
        return (
            abs(self.prefill - other.prefill)
            + abs(self.decode - other.decode)
            + abs(self.both - other.both)
        ) // 2


@dataclass(frozen=True)
class Headroom:
    """Multiples of the present load that each role could serve within the promise."""

    prefill: float
    decode: float

    @property
    def least(self) -> float:
        return min(self.prefill, self.decode)


class CapacityModel:
    """Headroom of splits at one moment."""

    def __init__(self, promise: Slo, estimates: FleetEstimates, view: FleetView) -> None:
        """Create the model; nothing may be observed while it is used."""
        self._promise = promise
        self._estimates = estimates
        # What waits for room in decode is no backlog of prefill.
        self._backlog_tokens = view.queued_tokens if view.is_decode_full else view.backlog_tokens
        self._running = view.running + (view.waiting_requests if view.is_decode_full else 0)
        self._most_running = max((worker.most_running for worker in view.workers), default=1)
        running = [each for each in view.workers if each.active == BOTH and each.running]
        self._token_s = sum(each.token_s * each.running for each in running) / max(
            sum(each.running for each in running), 1
        )
        self._most_use = cache(self._find_most_use)
        self._most_requests = cache(self._find_most_requests)

    @property
    def is_known(self) -> bool:
        """Return whether both speeds were measured, and anything arrives."""
        est = self._estimates
        return bool(est.alone_rate and est.token_s(1, 0) and est.demand.prompt_rate)

    @property
    def is_slow(self) -> bool:
        """Return whether workers of both roles nearly break the promise for tokens."""
        return self._token_s > SLOW * self._promise.tpot_s

    def headroom(self, split: RoleSplit) -> Headroom:
        """Return the headroom of a split.

        All workers that prefill do so for the same share of the time. Workers of both roles generate
        more slowly meanwhile, so that either role may limit this share.
        """
        prefill = self._prefill_room(split)
        if not split.both:
            return Headroom(prefill, self._decode_room(split, 0.0))
        most_use = self._most_use(split.prefill + split.both)
        rooms = [
            Headroom(prefill * share, self._decode_room(split, share * most_use))
            for share in BESIDE
        ]
        return max(rooms, key=lambda room: room.least)

    def cautious(self, split: RoleSplit) -> float:
        """Return the headroom of a split if the mix of the load is partly unknown.

        The fewer requests have arrived, the more the two roles are assumed to be wanted equally.
        """
        room = self.headroom(split)
        if not split.both and 0 < room.prefill < math.inf and 0 < room.decode < math.inf:
            count = self._estimates.demand.num_arrivals
            shift: float = self._imbalance ** (EVEN_REQUESTS / (count + EVEN_REQUESTS) / 2)
            return min(room.prefill * shift, room.decode / shift)
        return room.least

    @cached_property
    def _imbalance(self) -> float:
        """Return how much more of a prefill worker than of a decode worker is wanted."""
        room = self.headroom(RoleSplit(1, 1))
        return room.decode / room.prefill

    def _prefill_room(self, split: RoleSplit) -> float:
        est = self._estimates
        wanted = est.demand.prompt_rate + self._backlog_tokens / DRAIN_S
        if not est.alone_rate or not wanted:
            return math.inf
        capacity = split.prefill * est.alone_rate + split.both * est.beside_rate
        return self._most_use(split.prefill + split.both) * capacity / wanted

    def _decode_room(self, split: RoleSplit, beside: float) -> float:
        """Return the headroom of decode while workers of both roles prefill for a share of the
        time. Requests are spread evenly.
        """
        est = self._estimates
        if not est.token_s(1, 0):
            return math.inf
        num_workers = split.decode + split.both
        if not num_workers:
            return 0.0
        most = self._most_requests(beside)
        wanted = max(est.demand.output_rate * est.token_s(most, beside), self._running, 1e-9)
        return most * num_workers / wanted

    def _find_most_use(self, num_workers: int) -> float:
        """Return the share of its capacity that prefill may use within the time to first token.

        By Sakasegawa's approximation of the mean wait of M/M/c (Annals of the Institute of
        Statistical Mathematics 29, 1977).
        """
        est = self._estimates
        own_s = est.prompt_tokens / est.alone_rate if est.alone_rate else 0.0
        low, high = LEAST_USE, MOST_USE
        for _ in range(HALVINGS):
            use = (low + high) / 2
            wait_s = own_s * use ** (math.sqrt(2 * (num_workers + 1)) - 1) / (1 - use)
            is_kept = own_s + wait_s / max(num_workers, 1) <= self._promise.ttft_s
            low, high = (use, high) if is_kept else (low, use)
        return low

    def _find_most_requests(self, beside: float) -> float:
        """Return how many requests a worker may decode within the promise."""
        est = self._estimates
        share = est.pages_share.mean
        high = min(self._most_running, MOST_PAGES / share if share else math.inf)
        if est.token_s(high, beside) <= self._promise.tpot_s:
            return max(high, LEAST_REQUESTS)
        low = 0.0
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            is_kept = est.token_s(middle, beside) <= self._promise.tpot_s
            low, high = (middle, high) if is_kept else (low, middle)
        return max(low, LEAST_REQUESTS)


def splits(workers: Sequence[WorkerView]) -> Iterator[RoleSplit]:
    """Yield the splits with both roles that the planner considers for these workers.

    A worker does one thing if there are others for the other: chunks beside steps are short, and
    short chunks are slow.
    """
    num_prefill = sum(worker.able == ONLY_PREFILL for worker in workers)
    num_decode = sum(worker.able == ONLY_DECODE for worker in workers)
    for prefill in range(num_prefill, len(workers) - num_decode + 1):
        if 0 < prefill < len(workers):
            yield RoleSplit(prefill, len(workers) - prefill)
