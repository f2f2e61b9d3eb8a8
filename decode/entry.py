"""A request on a decode pool: the events that its stream gets, the scheduler's state of it, and the memory it
holds: pages for its tokens and a state slot, both or neither."""

from collections.abc import Callable
from dataclasses import dataclass, field

from decode.speculation import DraftState
from engine.core.request import DrawnToken, FinishReason, Request
from engine.memory.leases import PageAllocator, SlotAllocator, SlotLease, pages_for_tokens
from pool.request.entry import Entry, Failed
from runtime.errors import FieldViolation, InvalidRequestError


@dataclass(frozen=True)
class Drawn:
    """The request's next tokens: one, or several where drafted ones were accepted."""

    tokens: tuple[DrawnToken, ...]


@dataclass(frozen=True)
class Finished:
    reason: FinishReason
    stop_token_id: int | None
    queue_s: float  # joined to first step
    decode_s: float  # first step to last token
    num_preemptions: int


Event = Drawn | Finished | Failed
Emit = Callable[[Event], object]


@dataclass
class DecodeEntry(Entry[Event]):
    """One request, with what it has drawn."""

    outputs: list[int] = field(default_factory=list)
    told: int | None = None  # tokens of the output that the last stage keeps; None: it has no state of the request
    draft: DraftState = field(default_factory=DraftState)
    scratch: SlotLease | None = None  # where the states of its trees are kept; without it runs without trees
    running: bool = False  # has its memory filled and may be scheduled
    joined_s: float = 0.0
    first_step_s: float | None = None
    num_preemptions: int = 0
    preempted_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.outputs)

    @property
    def num_left(self) -> int:
        """Tokens it may still draw, as far as the request goes."""
        return self.request.max_tokens - len(self.outputs)

    def lease_scratch(self, scratch: SlotAllocator) -> None:
        """Take a record unless it has one, or none is free."""
        if self.scratch is None and (scratch.is_stateless or scratch.num_free):
            self.scratch = scratch.alloc(owner=self.owner)

    def free(self) -> None:
        """Give everything back."""
        super().free()
        if self.scratch is not None:
            self.scratch.end()
        self.scratch = None

    def tokens(self, start: int, end: int) -> list[int]:
        prompt = self.request.prompt_token_ids
        return [*prompt[start:end], *self.outputs[max(0, start - len(prompt)):max(0, end - len(prompt))]]


@dataclass(frozen=True)
class DecodeLimits:
    """`depth` is the number of stages. `max_running` rows are computed at a time; requests beyond them, up to
    `max_held`, take turns. `growth_tokens` are reserved beyond the prompt at admission. A pool that speculates
    verifies up to `num_draft_tokens` at once; where recurrent layers keep a state per node, of at most `max_running`
    requests: the others take plain steps until one of those leaves."""

    page_size: int
    grid: int
    depth: int
    max_running: int
    max_context_tokens: int
    max_held: int = 0  # 0: no more than run
    chunk_tokens: int = 512  # of a replay's prefill batches
    growth_tokens: int = 64
    num_draft_tokens: int = 0

    @property
    def speculates(self) -> bool:
        return self.num_draft_tokens > 0


@dataclass(frozen=True)
class Reservation:
    """Memory for one request: the pages its prompt lands in, in position order, and its state slot."""

    key: int
    prompt_page_ids: tuple[int, ...]
    slot_id: int


@dataclass(frozen=True)
class RequestMemory:
    """Leases for entries. Belongs to the engine thread."""

    limits: DecodeLimits
    pages: PageAllocator
    slots: SlotAllocator

    def check_fits(self, request: Request) -> None:
        """Raises InvalidRequestError for what would not fit into an empty pool."""
        total = len(request.prompt_token_ids) + request.max_tokens
        room = min(self.limits.max_context_tokens, self.pages.num_total * self.limits.page_size)
        if total > room:
            raise InvalidRequestError(FieldViolation(
                "max_tokens", f"prompt of {len(request.prompt_token_ids)} and max_tokens {request.max_tokens} "
                              f"are {total} tokens, the decode pool's limit is {room}"))

    def lease(self, entry: DecodeEntry) -> None:
        """Pages for the entry's tokens and some growth, and a slot. Raises CapacityError, and then holds neither."""
        most = len(entry.request.prompt_token_ids) + entry.request.max_tokens
        wanted = min(entry.num_tokens + self.limits.growth_tokens, max(most, entry.num_tokens))
        entry.lease(self.pages, self.slots, pages_for_tokens(wanted, self.limits.page_size))

    def reservation(self, entry: DecodeEntry) -> Reservation:
        """Of an entry that holds memory."""
        assert entry.pages is not None
        assert entry.slot is not None
        prompt_pages = pages_for_tokens(len(entry.request.prompt_token_ids), self.limits.page_size)
        return Reservation(entry.key, tuple(entry.pages.page_ids[:prompt_pages]), entry.slot.slot_id)
