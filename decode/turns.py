"""The turns of a decode pool's running requests, and the requests that wait after a preemption.

Belongs to the engine thread.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from decode.ahead import lease_ahead
from decode.entry import DecodeEntry, DecodeLimits
from decode.request_memory import RequestMemory
from decode.speculation import DraftState
from engine.memory.leases import PageAllocator, pages_for_tokens
from pool.request.entry_state import EntryState, EntryStep
from runtime.clock import Clock
from runtime.errors import CapacityError


@dataclass
class DecodeTurns:
    """The running requests, least recently launched first, and the preempted ones.

    A preempted request has released its memory. `waiting` resumes before any new request.
    """

    limits: DecodeLimits
    memory: RequestMemory
    clock: Clock
    on_preempted: Callable[[], object]
    waiting: list[DecodeEntry] = field(default_factory=list)
    _running: dict[int, DecodeEntry] = field(default_factory=dict)  # by key

    def __len__(self) -> int:
        """Return the number of running requests."""
        return len(self._running)

    def __iter__(self) -> Iterator[DecodeEntry]:
        """Return the running requests in turn order."""
        return iter(self._running.values())

    def ready(self) -> list[DecodeEntry]:
        """Return the running requests that have nothing in flight, in turn order."""
        return [entry for entry in self if not entry.in_flight]

    def add(self, entry: DecodeEntry) -> None:
        entry.step(EntryStep.RUN)
        self._running[entry.key] = entry

    def skip(self, entry: DecodeEntry) -> None:
        """Give an entry no further turn; it still counts as running."""
        self._running.pop(entry.key, None)

    def remove(self, entry: DecodeEntry) -> None:
        """Remove an entry from the running or the waiting ones."""
        self.skip(entry)
        if entry in self.waiting:
            self.waiting.remove(entry)

    def move_to_end(self, keys: Iterable[int]) -> None:
        """Note that these requests take a step."""
        for key in keys:
            self._running[key] = self._running.pop(key)

    def readmit(self) -> None:
        """Resume preempted requests while memory lasts, most urgent and oldest first."""
        self.waiting.sort(key=_order)
        while self.waiting:
            entry = self.waiting[0]
            try:
                self.memory.lease_to_read(entry)
            except CapacityError:
                return
            self.waiting.pop(0)
            self.add(entry)

    def stepping(self, ready: Sequence[DecodeEntry]) -> list[DecodeEntry]:
        """Return the requests that take the next step, after making sure that each has a page.

        They are a share of the rows, so that every stage gets a batch. Growing may preempt others
        of `ready`. Requests without a scratch record take plain steps in separate batches: in a
        batch with a tree, their own state would have to be kept as well.
        """
        share = -(-min(len(self), self.limits.max_running) // self.limits.depth)
        chosen: list[DecodeEntry] = []
        for entry in ready:
            if len(chosen) == share:
                break
            if chosen and (entry.scratch is None) is not (chosen[0].scratch is None):
                continue
            if entry.state is EntryState.RUNNING and self._grow(entry):
                entry.in_flight = 1  # now its pages cannot be taken by a preemption
                entry.first_step_s = (
                    self.clock.now() if entry.first_step_s is None else entry.first_step_s
                )
                chosen.append(entry)
        return chosen

    def stepping_ahead(self, pages: PageAllocator) -> list[DecodeEntry]:
        """Return the requests of the step after the one in flight; none if it must be waited for.

        A request past its deadline takes no step. It fails when that result arrives.
        """
        if self.waiting:
            return []
        now_s = self.clock.now()  # once for all rows, of the clock that deadlines are by
        punctual = [entry for entry in self if entry.deadline.at_s >= now_s]
        stepping = lease_ahead(punctual, self.limits, pages)
        for entry in stepping:
            entry.in_flight += 1
            entry.first_step_s = now_s if entry.first_step_s is None else entry.first_step_s
        return stepping

    def _grow(self, entry: DecodeEntry) -> bool:
        """Make sure that the entry's next token has a page; return whether it has one.

        Preempts another request, or this one, if no page is free.
        """
        while entry.pages is not None:
            missing = (
                pages_for_tokens(entry.computed + 1, self.limits.page_size) - entry.pages.num_pages
            )
            if missing <= 0:
                return True
            try:
                entry.pages.extend(missing)
            except CapacityError:
                self.preempt(self._least_due())
        return False

    def _least_due(self) -> DecodeEntry:
        """Return the request to preempt.

        It is one of the least urgent, and of these the youngest of the client that holds the most
        pages for its weight. The first of all in order of urgency and age is not chosen, so that
        every request ends.
        """
        ready = self.ready()
        first = min(self, key=_order)
        least_urgent = max(entry.request.priority for entry in ready)
        others = [
            entry
            for entry in ready
            if entry.request.priority == least_urgent and entry is not first
        ]
        held = dict.fromkeys((entry.request.share.client for entry in self), 0.0)
        for entry in self:
            if entry.pages is not None:
                share = entry.request.share
                held[share.client] += entry.pages.num_pages / share.weight
        return max(others or ready, key=lambda each: (held[each.request.share.client], each.key))

    def preempt(self, entry: DecodeEntry) -> None:
        """Take the memory of a running request, which has nothing in flight."""
        self.memory.keep_generated(entry)
        entry.free()
        entry.draft = DraftState()
        entry.step(EntryStep.PREEMPT)
        entry.num_preemptions += 1
        entry.preempted_s = self.clock.now()
        del self._running[entry.key]
        self.waiting.append(entry)
        self.on_preempted()


def _order(entry: DecodeEntry) -> tuple[int, int]:
    return entry.request.priority, entry.key
