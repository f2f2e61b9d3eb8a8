"""A request on a decode pool: the events of its stream, its scheduling state, its memory, its rows.

A request holds pages and a state slot, both or neither. Its next row has one token, a tree to
verify, or replayed tokens. Building a row counts its tokens as computed. The scheduler decides
which requests take part. Belongs to the engine thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from decode.speculation import DraftState
from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.draft_trees import AcceptedNodes
from engine.core.request import DrawnToken, FinishReason, Request
from engine.core.rows import NOT_DRAWN, Row, build_batch, chunk_end, sampling_row
from engine.memory.layout import NULL_INDEX
from engine.memory.leases import PageAllocator, SlotAllocator, SlotLease, pages_for_tokens
from pool.prefix.tree import Found
from pool.request.entry import Entry, Failed, PrefixCache
from runtime.clock import Clock
from runtime.digests import block_names, names_draft
from runtime.errors import CapacityError, FieldViolation, InvalidRequestError

REST_SHARE = 0.1  # largest fraction by which prefilling in a step may lengthen it
PACE_MEMORY = 0.9
# seconds after which a slow rate is forgotten, so that prefilling is tried again
PACE_MEMORY_S = 30.0


@dataclass(frozen=True)
class Drawn:
    """The event with the request's next tokens: one, or several if draft tokens were accepted."""

    tokens: tuple[DrawnToken, ...]


@dataclass(frozen=True)
class Finished:
    """The event that the request has its last token. It is the last event."""

    reason: FinishReason
    stop_token_id: int | None
    queue_s: float  # seconds from joining to the first step
    decode_s: float  # seconds from the first step to the last token
    num_preemptions: int


Event = Drawn | Finished | Failed
Emit = Callable[[Event], object]


@dataclass
class DecodeEntry(Entry[Event]):
    """One request with the tokens that it has sampled.

    `compatibility` is empty if it does not use the cache. Otherwise it is the digest of everything
    that its cached entries depend on, including the draft model if they hold its state.
    """

    outputs: list[int] = field(default_factory=list)
    compatibility: str = ""
    # Output tokens that the last stage knows; None if it has no state of the request.
    num_kept: int | None = None
    draft: DraftState = field(default_factory=DraftState)
    # The record for the states of its trees; without it the request runs without trees.
    scratch: SlotLease | None = None
    num_due: int = 0  # tokens that batches in flight sample
    running: bool = False  # whether its memory is filled and it may be scheduled
    joined_s: float = 0.0
    first_step_s: float | None = None
    num_preemptions: int = 0
    preempted_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.outputs)

    @property
    def num_final(self) -> int:
        """Return the number of leading tokens whose cache entries are at their final place.

        If the entries are to hold the draft model's state, that must be complete as well. Accepted
        nodes of a tree are moved to their place only with the next step, and a step ahead may write
        the newest token's entry. Valid for an entry with nothing else in flight.
        """
        if names_draft(self.compatibility) and not self.draft.is_whole:
            return 0
        final = min(self.computed, self.num_tokens - 1)
        return final if self.draft.accepted is None else self.draft.accepted.context_len

    @property
    def num_left(self) -> int:
        """Return the number of tokens that the request's `max_tokens` still allows."""
        return self.request.max_tokens - len(self.outputs)

    def ends_with_due(self, max_context_tokens: int) -> bool:
        """Return whether a token in flight is its last one, whatever that token is."""
        longest = min(
            self.request.max_tokens, max_context_tokens - len(self.request.prompt_token_ids)
        )
        return self.num_due > 0 and len(self.outputs) + self.num_due >= longest

    @property
    def scratch_id(self) -> int:
        """Return the index of its scratch record, or of the null record."""
        return NULL_INDEX if self.scratch is None else self.scratch.slot_id

    def lease_scratch(self, scratch: SlotAllocator) -> None:
        """Take a scratch record unless it has one or none is free."""
        if self.scratch is None and (scratch.is_stateless or scratch.num_free):
            self.scratch = scratch.alloc(owner=self.owner)

    def free(self) -> None:
        """Release all of its memory."""
        super().free()
        if self.scratch is not None:
            self.scratch.end()
        self.scratch = None

    def tokens(self, start: int, end: int) -> list[int]:
        prompt = self.request.prompt_token_ids
        return [
            *prompt[start:end],
            *self.outputs[max(0, start - len(prompt)) : max(0, end - len(prompt))],
        ]


@dataclass(frozen=True)
class DecodeLimits:
    """Limits of a decode scheduler.

    `depth` is the number of stages. `max_running` rows are computed at a time; further requests, up
    to `max_held`, take turns. `growth_tokens` are reserved beyond the prompt at admission.

    A pool that speculates verifies up to `num_draft_tokens` per request at once. If recurrent
    layers keep a state per node, only `max_running` requests have trees; the others take plain
    steps until one of those ends.

    With `has_states` no request can resume without a state (GatedDeltaNet, sliding windows), and a
    prefilled token may differ in its bits from a decoded one. With `steps_ahead` a step is prepared
    while the previous one computes; only pools of one stage without speculation support it.
    """

    page_size: int
    grid: int
    depth: int
    max_running: int
    max_context_tokens: int
    max_held: int = 0  # 0: the same as `max_running`
    chunk_tokens: int = 512  # tokens of a replay's prefill batches
    growth_tokens: int = 64
    num_draft_tokens: int = 0
    has_states: bool = False
    local_rest_tokens: int = 0  # most missing prompt tokens that are computed here
    steps_ahead: bool = False

    @property
    def speculates(self) -> bool:
        return self.num_draft_tokens > 0

    @property
    def reads_beside(self) -> bool:
        """Return whether prefill tokens fit into a batch with decode steps.

        They do unless the steps verify trees or layers keep states.
        """
        return not self.speculates and not self.has_states


@dataclass
class RestLimit:
    """The longest rest of a prompt that a pool prefills in a step of its streams.

    It is at most `most` tokens. By recent measurements, it lengthens the step by at most the
    fraction `REST_SHARE`. Belongs to the engine thread.
    """

    most: int
    clock: Clock
    _step_s: float = 0.0  # seconds of a step of streams only; 0.0: not measured
    _token_s: float = 0.0  # seconds per prefilled token; 0.0: not measured
    _seen_s: float = 0.0

    def stepped(self, seconds: float) -> None:
        """Record the duration of a step of streams."""
        self._step_s = _blend(self._step_s, seconds)

    def read(self, num_tokens: int, seconds: float, *, is_step: bool) -> None:
        """Record `num_tokens` prefilled in a step of streams, or while streams waited."""
        own_s = max(seconds - self._step_s, 0.0) if is_step else seconds
        self._token_s, self._seen_s = _blend(self._token_s, own_s / num_tokens), self.clock.now()

    def tokens(self, *, has_streams: bool) -> int:
        """Return the current limit."""
        is_known = self._token_s > 0 and self.clock.now() < self._seen_s + PACE_MEMORY_S
        if not has_streams or not is_known:
            return self.most
        return min(self.most, int(REST_SHARE * self._step_s / self._token_s))


def _blend(before: float, seen: float) -> float:
    return PACE_MEMORY * before + (1 - PACE_MEMORY) * seen if before else seen


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
        found, num_tokens = self._readable(entry), len(entry.request.prompt_token_ids)
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
            entry.compatibility, entry.blocks = "", ()
        self.cache.insert(entry.blocks, entry.pages.page_ids)

    def keep_drawn(self, entry: DecodeEntry) -> None:
        """Cache the sampled tokens of an entry that writes no more, after its prompt.

        They are cached only if prefilling them would give the same bits.
        """
        if entry.compatibility and not self.limits.has_states and entry.pages is not None:
            entry.blocks = block_names(
                entry.tokens(0, entry.num_final),
                self.limits.page_size,
                compatibility=entry.compatibility,
                salt=entry.request.cache_salt,
                known=entry.blocks,
            )
            self.cache.insert(
                entry.blocks[: entry.num_final // self.limits.page_size], entry.pages.page_ids
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
        self.cache.resume(entry.blocks, found)


@dataclass(frozen=True)
class StepBuilder:
    """Rows and batches of the entries that are scheduled.

    `draft_tokens(entry)` is the largest number of nodes of its next tree; None if its draft model
    does not follow.
    """

    limits: DecodeLimits
    pages: PageAllocator
    draft_tokens: Callable[[DecodeEntry], int | None]

    def decode(self, entries: Sequence[DecodeEntry]) -> ForwardBatch:
        """Build one step of entries whose prompts are computed and whose next token has a page."""
        rows = [self._decode_row(entry) for entry in entries]
        # A batch without any tree is plain decoding. It writes tokens to their final place and
        # leaves nothing to commit.
        if any(len(row.token_ids) > 1 for row in rows):
            return build_batch(ForwardMode.VERIFY, rows)
        for entry in entries:
            entry.draft.accepted = None
        return build_batch(ForwardMode.DECODE, rows)

    def readable(self, entry: DecodeEntry) -> int:
        """Return how many of its first tokens may be prefilled in chunks.

        These are the prompt and the output before the newest token. It is only the prompt if
        prefilled and decoded tokens may differ in their bits.
        """
        prompt_len = len(entry.request.prompt_token_ids)
        return prompt_len if self.limits.has_states else max(prompt_len, entry.num_tokens - 1)

    def read(self, entries: Sequence[DecodeEntry], beside: Sequence[DecodeEntry]) -> ForwardBatch:
        """Build a batch of the next chunks of known tokens, and a decode step of `beside`.

        The known tokens were not computed yet, or were lost by a preemption.
        """
        rows = [self._decode_row(entry) for entry in beside]
        budget = self.limits.chunk_tokens
        for entry in entries:
            total = self.readable(entry)
            end = chunk_end(entry.computed, total, budget, self.limits.grid)
            if end > entry.computed:
                draws = end == total and not entry.outputs
                budget -= end - entry.computed
                rows.append(self._known_row(entry, end, draws=draws))
        return build_batch(ForwardMode.PREFILL, rows)

    def begin(self, entries: Sequence[DecodeEntry]) -> ForwardBatch:
        """Build a batch that only grows the first trees of drafts that came with the prompts."""
        return build_batch(
            ForwardMode.PREBUILT,
            [
                _row(entry, [], draws=False)._replace(
                    spec=entry.draft.begin(self.draft_tokens(entry))
                )
                for entry in entries
            ],
        )

    def _decode_row(self, entry: DecodeEntry) -> Row:
        if not self.limits.speculates:
            return self._known_row(
                entry,
                entry.computed + 1,
                draws=entry.computed == entry.num_tokens + entry.num_due - 1,
            )
        return (
            self._replayed_row(entry)
            if entry.num_tokens - entry.computed > 1
            else self._verified_row(entry)
        )

    def _known_row(self, entry: DecodeEntry, end: int, *, draws: bool) -> Row:
        """Return a row for the known tokens up to `end`, or for the token that is due."""
        row = _row(
            entry, [NOT_DRAWN] if entry.num_due else entry.tokens(entry.computed, end), draws=draws
        )
        entry.advance(end)
        if not self.limits.speculates:
            return row
        next_token_id = None if draws else entry.tokens(end, end + 1)[0]
        return row._replace(
            spec=entry.draft.prefill(row.context_len, next_token_id, self.draft_tokens(entry))
        )

    def _replayed_row(self, entry: DecodeEntry) -> Row:
        """Return a row that replays known output tokens as a chain."""
        count = self._room(
            entry, min(entry.num_tokens - entry.computed - 1, self.limits.num_draft_tokens + 1)
        )
        end = entry.computed + count
        row = _row(entry, entry.tokens(entry.computed, end), draws=False)
        spec = entry.draft.replay(
            entry.computed,
            count,
            entry.tokens(end, end + 1)[0],
            num_draft_tokens=self.draft_tokens(entry),
            scratch=entry.scratch_id,
        )
        entry.draft.accepted = AcceptedNodes(entry.computed, tuple(range(count)))
        entry.advance(end)
        return row._replace(spec=spec)

    def _verified_row(self, entry: DecodeEntry) -> Row:
        """Return a row for the newest token with the tree drafted after it.

        The number of computed tokens is known only after verification.
        """
        num_left = min(entry.num_left, self.limits.max_context_tokens - entry.num_tokens)
        max_nodes = self._room(entry, 1 + len(entry.draft.tree)) - 1 if entry.draft.tree else 0
        tree, spec = entry.draft.verify(
            entry.computed,
            max_nodes=max_nodes,
            max_depth=num_left - 1,
            num_draft_tokens=self.draft_tokens(entry),
            scratch=entry.scratch_id,
        )
        newest = entry.tokens(entry.computed, entry.num_tokens)
        return _row(entry, [*newest, *tree.token_ids], draws=True)._replace(spec=spec)

    def _room(self, entry: DecodeEntry, wanted: int) -> int:
        """Return how many of `wanted` more tokens the entry has memory for.

        Takes free pages if needed, but none from other requests.
        """
        assert entry.pages is not None
        wanted = 1 if entry.scratch is None else wanted
        missing = (
            pages_for_tokens(entry.computed + wanted, self.limits.page_size) - entry.pages.num_pages
        )
        if 0 < missing <= self.pages.num_available:
            entry.pages.extend(missing)
        return min(wanted, entry.pages.num_pages * self.limits.page_size - entry.computed)


def _row(entry: DecodeEntry, tokens: list[int], *, draws: bool) -> Row:
    assert entry.pages is not None
    assert entry.slot is not None
    sampling = None
    if draws:
        sampling = sampling_row(
            entry.request,
            entry.outputs,
            key=entry.key,
            known=entry.num_kept,
            is_only=False,
            num_due=entry.num_due,
        )
        entry.num_due += 1
        if sampling.output is not None:
            entry.num_kept = len(entry.outputs)
    return Row(entry.key, tokens, entry.computed, entry.pages.table, entry.slot.slot_id, sampling)
