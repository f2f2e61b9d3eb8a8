"""The memory of a decode pool's requests: pages and a state slot, both or neither."""

from collections.abc import Iterable
from dataclasses import dataclass

from decode.entry import DecodeEntry, DecodeLimits
from engine.core.request import Request
from engine.memory.leases import PageAllocator, SlotAllocator, pages_for_tokens
from pool.prefix.cache import PrefixCache
from pool.prefix.tree import Found
from pool.request.entry_state import EntryState
from pool.stage.metrics import PoolOccupancy
from runtime.digests import block_names, names_draft
from runtime.errors import CapacityError, FieldViolation, InvalidRequestError

# A released request that has steps in flight is still computed.
COMPUTED_STATES = (EntryState.RUNNING, EntryState.RELEASED)


@dataclass(frozen=True)
class Reservation:
    """Memory for one request: the pages of its prompt, in position order, and its state slot.

    The pages of the first `held_tokens` are shared and already filled, so nothing lands there.
    """

    key: int
    prompt_page_ids: tuple[int, ...]
    slot_id: int
    held_tokens: int = 0
    data_rank: int = 0


@dataclass(frozen=True)
class RequestMemory:
    """Leases of entries, and the cached pages that these leave. Belongs to the engine thread."""

    limits: DecodeLimits
    pages: PageAllocator
    slots: SlotAllocator
    cache: PrefixCache
    data_rank: int = 0

    def check_fits(self, request: Request) -> None:
        """Check that a request fits into an empty pool.

        Raises:
            InvalidRequestError: it would not.
        """
        total = len(request.prompt_token_ids) + request.max_tokens
        room = min(self.limits.max_context_tokens, self.pages.num_total * self.limits.page_size)
        if total > room:
            raise InvalidRequestError(
                FieldViolation(
                    "max_tokens",
                    f"prompt of {len(request.prompt_token_ids)} and max_tokens {request.max_tokens} "
                    f"are {total} tokens, the decode pool's limit is {room}",
                )
            )

    def lease(self, entry: DecodeEntry) -> None:
        """Lease a slot and pages for a prompt that will land and some growth; share cached pages.

        Raises:
            CapacityError: memory is short; then neither is leased.
        """
        num_tokens = len(entry.request.prompt_token_ids)
        found = self.cache.find(entry.blocks, num_tokens)
        self._lease(entry, found)
        if entry.compatibility:
            self.cache.metrics.queried.inc(num_tokens)
            self.cache.metrics.matched.inc(found.num_tokens)

    def lease_to_read(self, entry: DecodeEntry) -> None:
        """Lease as `lease` does, for an entry that computes its missing tokens here."""
        found = self._readable(entry)
        self._lease(entry, found)
        entry.advance(found.num_tokens)
        entry.draft.followed = names_draft(entry.compatibility)

    def lease_for_rest(self, entry: DecodeEntry, most: int) -> None:
        """Lease as `lease_to_read` does, for a new prompt.

        Raises:
            CapacityError: memory is short, or more than `most` tokens of the prompt are missing.
        """
        found = self._readable(entry)
        num_tokens = len(entry.request.prompt_token_ids)
        num_missing = num_tokens - found.num_tokens
        if num_missing > most:
            raise CapacityError(
                f"{num_missing} tokens of the prompt are not cached, the limit is {most}",
                resource="prefix cache",
            )
        self.lease_to_read(entry)
        for counter, count in (
            (self.cache.metrics.queried, num_tokens),
            (self.cache.metrics.matched, found.num_tokens),
            (self.cache.metrics.reused, found.num_tokens),
        ):
            counter.inc(count)

    def hold_known(self, entry: DecodeEntry) -> bool:
        """Take pages for the known tokens of an entry with a computed prompt; return whether it has
        them.
        """
        assert entry.pages is not None
        missing = pages_for_tokens(entry.num_tokens, self.limits.page_size) - entry.pages.num_pages
        try:
            entry.pages.extend(max(missing, 0))
        except CapacityError:
            return False
        return True

    def reservation(self, entry: DecodeEntry) -> Reservation:
        """Return the reservation of an entry that holds memory."""
        assert entry.pages is not None
        assert entry.slot is not None
        prompt_pages = pages_for_tokens(len(entry.request.prompt_token_ids), self.limits.page_size)
        return Reservation(
            entry.key,
            tuple(entry.pages.page_ids[:prompt_pages]),
            entry.slot.slot_id,
            entry.pages.num_shared * self.limits.page_size,
            self.data_rank,
        )

    def keep_landed(self, entry: DecodeEntry, *, with_draft: bool) -> None:
        """Cache a prompt that has landed and was checked.

        It is not cached if the draft model's part is missing, because no lookup would match it.
        """
        assert entry.pages is not None
        self.cache.metrics.reused.inc(entry.pages.num_shared * self.limits.page_size)
        if names_draft(entry.compatibility) is not with_draft:
            entry.compatibility = ""
            entry.blocks = ()
        if not self.cache.has_states:
            self.cache.insert(entry.blocks, entry.pages.page_ids, session=entry.request.session)

    def keep_generated(self, entry: DecodeEntry) -> None:
        """Cache the sampled tokens of an entry that writes no more, after its prompt.

        They are cached only if prefilling them would give the same bits.
        """
        if entry.compatibility and not self.limits.has_states and entry.pages is not None:
            entry.blocks = block_names(
                entry.tokens(0, entry.num_final),
                self.limits.page_size,
                compatibility=entry.compatibility,
                salt=entry.request.cache_salt,
                adapter=entry.request.adapter,
                known=entry.blocks,
            )
            self.cache.insert(
                entry.blocks[: entry.num_final // self.limits.page_size],
                entry.pages.page_ids,
                session=entry.request.session,
            )

    def _readable(self, entry: DecodeEntry) -> Found:
        """Return the cached part to resume from; nothing if the model needs states."""
        return (
            Found() if self.limits.has_states else self.cache.find(entry.blocks, entry.num_tokens)
        )

    def _lease(self, entry: DecodeEntry, found: Found) -> None:
        most = len(entry.request.prompt_token_ids) + entry.request.max_tokens
        wanted = min(entry.num_tokens + self.limits.growth_tokens, max(most, entry.num_tokens))
        entry.lease(
            self.pages,
            self.slots,
            pages_for_tokens(wanted, self.limits.page_size),
            shared=found.page_ids,
        )
        self.cache.resume(entry.blocks, found, entry.request.session)


def occupancy_of(
    entries: Iterable[DecodeEntry], waiting: Iterable[DecodeEntry], now_s: float
) -> PoolOccupancy:
    """Return how many requests hold memory, landing or running, and the longest preemption."""
    computed = [entry for entry in entries if entry.state in COMPUTED_STATES]
    landing = [
        entry for entry in entries if entry.state not in COMPUTED_STATES and entry.pages is not None
    ]
    preempted_s = [entry.preempted_s for entry in waiting]
    return PoolOccupancy(
        {"landing": len(landing), "running": len(computed)},
        sum(entry.pages.num_pages for entry in landing if entry.pages is not None),
        now_s - min(preempted_s) if preempted_s else 0.0,
    )
