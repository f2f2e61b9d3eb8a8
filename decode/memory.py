"""The memory a request holds on a decode pool: pages for its tokens and a state slot, both or neither."""

from dataclasses import dataclass

from decode.entry import DecodeEntry
from decode.steps import DecodeLimits
from engine.core.request import Request
from engine.memory.pages import PageAllocator, pages_for_tokens
from engine.memory.slots import SlotAllocator
from runtime.errors import FieldViolation, InvalidRequestError


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
