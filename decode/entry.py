"""A request on a decode pool: the events that its stream gets, the scheduler's state of it, the
memory it holds (pages for its tokens and a state slot, both or neither), and what its next step
brings into a batch: one token, a tree to verify, or tokens of a replay.

Building a row counts its tokens as computed; which requests take part is the scheduler's decision.
Belongs to the engine thread.
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

REST_SHARE = 0.1  # of a step: so much longer it may get by what is read in it
PACE_MEMORY = 0.9
PACE_MEMORY_S = 30.0  # what was slow once would otherwise never be tried again


@dataclass(frozen=True)
class Drawn:
    """The request's next tokens: one, or several where drafted ones were accepted."""

    tokens: tuple[DrawnToken, ...]


@dataclass(frozen=True)
class Finished:
    """The request has its last token. Nothing follows."""

    reason: FinishReason
    stop_token_id: int | None
    queue_s: float  # joined to first step
    decode_s: float  # first step to last token
    num_preemptions: int


Event = Drawn | Finished | Failed
Emit = Callable[[Event], object]


@dataclass
class DecodeEntry(Entry[Event]):
    """One request, with what it has drawn. Where it takes part in the cache `compatibility` is the
    digest of what its entries are computed with, and of the draft if its state is part of them."""

    outputs: list[int] = field(default_factory=list)
    compatibility: str = ""
    num_kept: int | None = (
        None  # tokens of the output that the last stage keeps; None: it has no state of the request
    )
    draft: DraftState = field(default_factory=DraftState)
    scratch: SlotLease | None = (
        None  # where the states of its trees are kept; without it runs without trees
    )
    num_due: int = 0  # tokens that batches in flight draw
    running: bool = False  # has its memory filled and may be scheduled
    joined_s: float = 0.0
    first_step_s: float | None = None
    num_preemptions: int = 0
    preempted_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.outputs)

    @property
    def num_final(self) -> int:
        """Tokens, from its first, whose entries are where they stay, the draft's among them if they
        are to be. What a tree has left is moved there with the next step only; the newest token's
        is written by a step ahead, if at all. Of an entry with nothing else in flight."""
        if names_draft(self.compatibility) and not self.draft.is_whole:
            return 0
        final = min(self.computed, self.num_tokens - 1)
        return final if self.draft.accepted is None else self.draft.accepted.context_len

    @property
    def num_left(self) -> int:
        """Tokens it may still draw, as far as the request goes."""
        return self.request.max_tokens - len(self.outputs)

    def ends_with_due(self, max_context_tokens: int) -> bool:
        """Whether a token in flight is its last one, whatever it is."""
        longest = min(
            self.request.max_tokens, max_context_tokens - len(self.request.prompt_token_ids)
        )
        return self.num_due > 0 and len(self.outputs) + self.num_due >= longest

    @property
    def scratch_id(self) -> int:
        """Of its record, or of the null record."""
        return NULL_INDEX if self.scratch is None else self.scratch.slot_id

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
        return [
            *prompt[start:end],
            *self.outputs[max(0, start - len(prompt)) : max(0, end - len(prompt))],
        ]


@dataclass(frozen=True)
class DecodeLimits:
    """`depth` is the number of stages. `max_running` rows are computed at a time; requests beyond
    them, up to `max_held`, take turns. `growth_tokens` are reserved beyond the prompt at admission.
    A pool that speculates verifies up to `num_draft_tokens` at once; where recurrent layers keep a
    state per node, of at most `max_running` requests: the others take plain steps until one of
    those leaves. With `has_states` nothing goes on without a state (GatedDeltaNet, sliding
    windows), and tokens may have other bits read than drawn. With `steps_ahead`, which is for pools
    of one stage that do not speculate, a step is prepared while the one before it computes."""

    page_size: int
    grid: int
    depth: int
    max_running: int
    max_context_tokens: int
    max_held: int = 0  # 0: no more than run
    chunk_tokens: int = 512  # of a replay's prefill batches
    growth_tokens: int = 64
    num_draft_tokens: int = 0
    has_states: bool = False
    local_rest_tokens: int = 0  # of a prompt that is computed here, at most
    steps_ahead: bool = False

    @property
    def speculates(self) -> bool:
        return self.num_draft_tokens > 0

    @property
    def reads_beside(self) -> bool:
        """Whether tokens can be read in one batch with steps of others, which then are no trees and
        have no states."""
        return not self.speculates and not self.has_states


@dataclass
class RestLimit:
    """The longest rest of a prompt that a pool reads in a step of its streams: at most `most`
    tokens, and none that would make the step longer by more than `REST_SHARE`, as far as was seen
    lately. Belongs to the engine thread."""

    most: int
    clock: Clock
    _step_s: float = 0.0  # of streams alone; 0.0: not seen
    _token_s: float = 0.0  # of each token read; 0.0: not seen
    _seen_s: float = 0.0

    def stepped(self, seconds: float) -> None:
        """Streams took a step."""
        self._step_s = _blend(self._step_s, seconds)

    def read(self, num_tokens: int, seconds: float, *, is_step: bool) -> None:
        """So many tokens were read, in a step of streams or while they waited."""
        own_s = max(seconds - self._step_s, 0.0) if is_step else seconds
        self._token_s, self._seen_s = _blend(self._token_s, own_s / num_tokens), self.clock.now()

    def tokens(self, *, has_streams: bool) -> int:
        """The limit now."""
        is_known = self._token_s > 0 and self.clock.now() < self._seen_s + PACE_MEMORY_S
        if not has_streams or not is_known:
            return self.most
        return min(self.most, int(REST_SHARE * self._step_s / self._token_s))


def _blend(before: float, seen: float) -> float:
    return PACE_MEMORY * before + (1 - PACE_MEMORY) * seen if before else seen


@dataclass(frozen=True)
class Reservation:
    """Memory for one request: the pages its prompt lands in, in position order, and its state slot.
    Those of the first `held_tokens` have their content and are shared: nothing lands there."""

    key: int
    prompt_page_ids: tuple[int, ...]
    slot_id: int
    held_tokens: int = 0
    data_rank: int = 0


@dataclass(frozen=True)
class RequestMemory:
    """Leases for entries, and what these leave in the cache. Belongs to the engine thread."""

    limits: DecodeLimits
    pages: PageAllocator
    slots: SlotAllocator
    cache: PrefixCache
    data_rank: int = 0

    def check_fits(self, request: Request) -> None:
        """Raises InvalidRequestError for what would not fit into an empty pool."""
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
        """Pages for a prompt that is to land and some growth, and a slot; what is cached of it
        among them. Raises CapacityError, and then holds neither."""
        num_tokens = len(entry.request.prompt_token_ids)
        found = self.cache.find(entry.blocks, num_tokens)
        self._lease(entry, found)
        if entry.compatibility:
            self.cache.metrics.queried.inc(num_tokens)
            self.cache.metrics.matched.inc(found.num_tokens)

    def lease_to_read(self, entry: DecodeEntry) -> None:
        """As `lease`, of an entry that will compute here what it has no entries of."""
        found = self._readable(entry)
        self._lease(entry, found)
        entry.advance(found.num_tokens)
        entry.draft.followed = names_draft(entry.compatibility)

    def lease_for_rest(self, entry: DecodeEntry, most: int) -> None:
        """As `lease_to_read`, of a prompt that is new here; CapacityError, too, where more than
        `most` tokens of it are missing."""
        found, num_tokens = self._readable(entry), len(entry.request.prompt_token_ids)
        num_missing = num_tokens - found.num_tokens
        if num_missing > most:
            raise CapacityError(
                f"{num_missing} tokens of the prompt are not here, the limit is {most}",
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
        """Of an entry that holds memory."""
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
        """Its prompt has landed and was checked. It is kept unless the draft's part is missing, or
        nobody would look for it."""
        assert entry.pages is not None
        self.cache.metrics.reused.inc(entry.pages.num_shared * self.limits.page_size)
        if names_draft(entry.compatibility) is not with_draft:
            entry.compatibility, entry.blocks = "", ()
        self.cache.insert(entry.blocks, entry.pages.page_ids)

    def keep_drawn(self, entry: DecodeEntry) -> None:
        """It will write no more: what it drew is kept with its prompt, where it has the bits that
        reading it would give."""
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
        """What is there to go on from: nothing without a state, where the model has any."""
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
    """Rows and batches of the entries that are to run. `draft_tokens(entry)`: how many nodes its
    next tree may have; None: its draft does not follow."""

    limits: DecodeLimits
    pages: PageAllocator
    draft_tokens: Callable[[DecodeEntry], int | None]

    def decode(self, entries: Sequence[DecodeEntry]) -> ForwardBatch:
        """One step of entries whose prompts are computed and whose next token has a page."""
        rows = [self._decode_row(entry) for entry in entries]
        # A batch without any tree is plain decoding, which writes where its tokens belong and
        # leaves nothing to commit.
        if any(len(row.token_ids) > 1 for row in rows):
            return build_batch(ForwardMode.VERIFY, rows)
        for entry in entries:
            entry.draft.accepted = None
        return build_batch(ForwardMode.DECODE, rows)

    def readable(self, entry: DecodeEntry) -> int:
        """How many of its first tokens may be read in chunks: the prompt, and what was drawn before
        the newest token, but where tokens have other bits read than drawn."""
        prompt_len = len(entry.request.prompt_token_ids)
        return prompt_len if self.limits.has_states else max(prompt_len, entry.num_tokens - 1)

    def read(self, entries: Sequence[DecodeEntry], beside: Sequence[DecodeEntry]) -> ForwardBatch:
        """The next chunks of known tokens that are not computed, or not any more, as many as one
        batch takes, and a step of those `beside`."""
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
        """The first trees of entries whose drafts have landed with their prompts; nothing else is
        computed."""
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
        """Known tokens up to `end`, or the one that is due."""
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
        """Known tokens of the answer, which all stand, as a chain."""
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
        """The newest token with the tree drafted after it. What counts as computed is known once it
        is verified."""
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
        """How many of `wanted` more tokens the entry has memory for; takes free pages, but none
        from others."""
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
