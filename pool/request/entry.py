"""The role-independent scheduling state of a request, and the choice of a data rank."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from engine.core.batch import ForwardBatch
from engine.core.request import Request
from engine.memory.leases import PageAllocator, PageLease, SlotAllocator, SlotLease
from pool.prefix.cache import PrefixCache
from pool.request.entry_state import ENTRY_TRANSITIONS, RELEASED_STATES, EntryState, EntryStep
from pool.stage.metrics import PoolOccupancy, SchedulerLoad
from runtime.clock import NO_DEADLINE, Deadline
from runtime.errors import BatonError, CapacityError, InternalError

EventT = TypeVar("EventT")


@dataclass(frozen=True)
class Failed:
    """The event that the engine runs the request no more. Its owner releases it."""

    error: BatonError


@dataclass
class Entry(Generic[EventT]):
    """One request of a scheduler, from `submit` to `release`. Belongs to the engine thread.

    `blocks` are the cache names of its full pages, empty if it does not use the cache.
    """

    key: int
    request: Request
    emit: Callable[[EventT], object]
    pages: PageLease | None = None  # None while it waits
    slot: SlotLease | None = None
    in_flight: int = 0  # batches that contain it
    deadline: Deadline = NO_DEADLINE  # by the clock of its scheduler
    blocks: tuple[bytes, ...] = ()
    _computed: int = field(default=0, init=False)
    _state: EntryState = field(default=EntryState.PENDING, init=False)

    @property
    def state(self) -> EntryState:
        return self._state

    def step(self, step: EntryStep) -> None:
        """Go to the next state.

        Raises:
            InternalError: the state does not allow the step.
        """
        after = ENTRY_TRANSITIONS.get((self._state, step))
        if after is None:
            raise InternalError(f"{self.owner} is {self._state}, which does not allow {step}")
        self._state = after

    @property
    def owner(self) -> str:
        """Return its name in the ledgers of pages and slots."""
        return f"request {self.key}"

    @property
    def computed(self) -> int:
        """Return how many tokens have cache entries, written or in flight. Tree nodes do not count.

        Batches keep their order, so entries in flight exist for every batch launched later.
        """
        return self._computed

    def advance(self, end: int) -> None:
        """Set `computed` to `end`; the only way to change it."""
        self._computed = end

    def lease(
        self,
        pages: PageAllocator,
        slots: SlotAllocator,
        num_pages: int,
        *,
        shared: Sequence[int] = (),
    ) -> None:
        """Take a slot and `num_pages` pages, of which the first are the cached pages `shared`.

        Raises:
            CapacityError: memory is short; then neither is held.
        """
        try:
            # Shared first, so that they are not evicted to make room for the others.
            self.pages = pages.alloc(0, owner=self.owner, shared=shared)
            self.slot = slots.alloc(owner=self.owner)
            self.pages.extend(num_pages - len(shared))
        except CapacityError:
            self.free()
            raise

    def free(self) -> None:
        """Release slot and pages, and with them the computed tokens."""
        for lease in (self.pages, self.slot):
            if lease is not None:
                lease.end()
        self.pages = self.slot = None
        self.advance(0)


EntryT = TypeVar("EntryT", bound=Entry[Any])


class EntryTable(Generic[EntryT]):
    """The requests of a scheduler by key, in admission order. Belongs to the engine thread."""

    def __init__(self) -> None:
        self._by_key: dict[int, EntryT] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[EntryT]:
        return iter(self._by_key.values())

    def __contains__(self, key: int) -> bool:
        return key in self._by_key

    def __getitem__(self, key: int) -> EntryT:
        return self._by_key[key]

    def get(self, key: int) -> EntryT | None:
        """Return the request, or None if it is over."""
        return self._by_key.get(key)

    def add(self, entry: EntryT) -> None:
        self._by_key[entry.key] = entry

    def forget(self, entry: EntryT) -> None:
        """Release the memory of a request, which nothing writes any more, and drop it."""
        entry.step(EntryStep.FORGET)
        entry.free()
        del self._by_key[entry.key]

    @property
    def owners(self) -> set[str]:
        """Return the names of all requests in the ledgers of pages and slots."""
        return {entry.owner for entry in self}


class EntryOwner(ABC, Generic[EntryT]):
    """The part of a scheduler that ends its requests, the same for both roles.

    Belongs to the engine thread.
    """

    _entries: EntryTable[EntryT]

    @property
    @abstractmethod
    def cache(self) -> PrefixCache: ...

    @abstractmethod
    def _unschedule(self, entry: EntryT) -> None:
        """Prepare no further step of an entry."""

    def _release_in_flight(self, entry: EntryT) -> None:
        """Prepare no further step of an entry that is forgotten when its steps are over."""
        self._unschedule(entry)

    @abstractmethod
    def _on_forget(self, entry: EntryT) -> None:
        """Note that an entry is over; its memory is released next."""

    @property
    def owners(self) -> set[str]:
        """Return the names of its requests in the ledgers of pages and slots."""
        return self._entries.owners

    def holds(self, key: int) -> bool:
        return key in self._entries

    def has_adapter(self, adapter: str) -> bool:
        """Return whether a request has this adapter, also one that only its last step holds."""
        return any(entry.request.adapter == adapter for entry in self._entries)

    def request_of(self, key: int) -> Request | None:
        """Return the request of this key, or None if it is over."""
        entry = self._entries.get(key)
        return None if entry is None else entry.request

    def release(self, key: int) -> None:
        """Release the request's memory once no batch in flight uses it. Idempotent."""
        entry = self._entries.get(key)
        if entry is None:
            return
        entry.step(EntryStep.RELEASE)
        if entry.in_flight:
            self._release_in_flight(entry)
        else:
            self._forget(entry)

    def on_pipeline_lost(self, in_flight: list[ForwardBatch], error: BatonError) -> None:
        self.cache.clear()  # a replaced stage comes with empty memory
        for entry in list(self._entries):
            entry.in_flight = 0
            if entry.state in RELEASED_STATES:
                self._forget(entry)
            else:
                self._fail(entry, error)

    def _fail(self, entry: EntryT, error: BatonError) -> None:
        """Notify the owner of the failure, and schedule no more of the request.

        The owner releases it once nothing writes its memory any more, since bytes may still be
        landing.
        """
        entry.step(EntryStep.FAIL)
        self._unschedule(entry)
        entry.emit(Failed(error))

    def _forget(self, entry: EntryT) -> None:
        self._unschedule(entry)
        self._on_forget(entry)
        self._entries.forget(entry)


class RankScheduler(Protocol):
    """The part of a data rank's scheduler that its pool uses."""

    @property
    def cache(self) -> PrefixCache: ...

    def holds(self, key: int) -> bool:
        """Return whether this scheduler has the request of this key."""
        ...

    def has_adapter(self, adapter: str) -> bool:
        """Return whether a request of this scheduler has this adapter."""
        ...

    def load(self) -> SchedulerLoad: ...

    def occupancy(self) -> PoolOccupancy: ...


SchedulerT = TypeVar("SchedulerT", bound=RankScheduler)
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class DataRanks(Generic[SchedulerT]):
    """The schedulers of a pool, one per data rank. Belongs to the engine thread.

    A request is placed on one of them with all its memory.
    """

    schedulers: tuple[SchedulerT, ...]

    def place(
        self,
        request: Request,
        blocks: Sequence[bytes],
        admit: Callable[[SchedulerT], ResultT],
        first: int | None = None,
    ) -> ResultT:
        """Admit the request on the least loaded data rank with room; return `admit`'s result.

        Ranks are ordered by queued tokens less cached tokens, then by free pages, then by requests;
        `first` precedes them. `blocks` are the names of its prompt's full pages; cached ones need
        not be computed or sent.

        Raises:
            CapacityError: no rank had room; the error is that of the first choice.
        """

        if len(self.schedulers) == 1:
            return admit(self.schedulers[0])
        refusal: CapacityError | None = None
        ranks = self._by_worth(request, blocks)
        for rank in sorted(ranks, key=lambda rank: rank != first):
            try:
                return admit(self.schedulers[rank])
            except CapacityError as error:
                refusal = refusal or error
        assert refusal is not None
        raise refusal

    def preferred(self, request: Request, blocks: Sequence[bytes], expected: Sequence[int]) -> int:
        """Return the data rank on which `place` would admit the request first.

        `expected` are the tokens that each is going to have queued besides.
        """
        return self._by_worth(request, blocks, expected)[0]

    def _by_worth(
        self, request: Request, blocks: Sequence[bytes], expected: Sequence[int] = ()
    ) -> list[int]:
        """Return the data ranks in the order in which they are tried."""

        def worth(rank: int) -> tuple[int, int, int]:
            scheduler = self.schedulers[rank]
            load = scheduler.load()
            found = scheduler.cache.find(blocks, len(request.prompt_token_ids))
            return (
                load.queued_tokens + (expected[rank] if expected else 0) - found.num_tokens,
                -load.pages_free,
                load.queued_requests + load.running_requests,
            )

        return sorted(range(len(self.schedulers)), key=worth)

    def of(self, key: int) -> SchedulerT:
        """Return the scheduler that has this request, or any if the request is over."""
        return next(
            (scheduler for scheduler in self.schedulers if scheduler.holds(key)), self.schedulers[0]
        )

    def load(self) -> SchedulerLoad:
        """Return the summed load of all data ranks."""
        every = tuple(scheduler.load() for scheduler in self.schedulers)
        if len(every) == 1:
            return every[0]
        return SchedulerLoad(
            sum(each.queued_requests for each in every),
            sum(each.running_requests for each in every),
            sum(each.pages_free for each in every),
            sum(each.slots_free for each in every),
            sum(each.queued_tokens for each in every),
            every,
            max(each.local_rest_tokens for each in every),
        )

    def occupancy(self) -> PoolOccupancy:
        """Return the summed occupancy of all data ranks, with the greatest of their ages."""
        every = [scheduler.occupancy() for scheduler in self.schedulers]
        if len(every) == 1:
            return every[0]
        leases = {state: sum(each.leases[state] for each in every) for state in every[0].leases}
        return PoolOccupancy(
            leases, sum(each.num_pages_held for each in every), max(each.oldest_s for each in every)
        )

    def has_adapter(self, adapter: str) -> bool:
        """Return whether a request has this adapter."""
        return any(scheduler.has_adapter(adapter) for scheduler in self.schedulers)

    def flush(self) -> int:
        """Empty the prefix caches; return the number of evicted pages."""
        return sum(scheduler.cache.clear() for scheduler in self.schedulers)
