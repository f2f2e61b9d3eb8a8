"""A request on a decode pool: the events that its stream gets, the scheduler's state of it, the memory it holds (pages
for its tokens and a state slot, both or neither), and what its next step brings into a batch: one token, a tree to
verify, or tokens of a replay.

Building a row counts its tokens as computed; which requests take part is the scheduler's decision. Belongs to the
engine thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from decode.speculation import DraftState
from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.draft_trees import AcceptedNodes
from engine.core.request import DrawnToken, FinishReason, Request
from engine.core.rows import Row, build_batch, chunk_end, sampling_row
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


@dataclass(frozen=True)
class StepBuilder:
    """Rows and batches of the entries that are to run. `draft_tokens(entry)`: how many nodes its next tree may have."""

    limits: DecodeLimits
    pages: PageAllocator
    draft_tokens: Callable[[DecodeEntry], int]

    def decode(self, entries: Sequence[DecodeEntry]) -> ForwardBatch:
        """One step of entries whose prompts are computed and whose next token has a page."""
        rows = [self._decode_row(entry) for entry in entries]
        # A batch without any tree is plain decoding, which writes where its tokens belong and leaves nothing to commit.
        if any(len(row.token_ids) > 1 for row in rows):
            return build_batch(ForwardMode.VERIFY, rows)
        for entry in entries:
            entry.draft.accepted = None
        return build_batch(ForwardMode.DECODE, rows)

    def readable(self, entry: DecodeEntry) -> int:
        """How many of its first tokens may be read in chunks: the prompt, and what was drawn before the newest token,
        but where tokens have other bits read than drawn (GatedDeltaNet, whose chunks lie on a grid)."""
        prompt_len = len(entry.request.prompt_token_ids)
        return prompt_len if self.limits.grid > 1 else max(prompt_len, entry.num_tokens - 1)

    def replay(self, entries: Sequence[DecodeEntry]) -> ForwardBatch | None:
        """The next chunks of tokens that are to be computed again, as many as one batch takes."""
        rows: list[Row] = []
        budget = self.limits.chunk_tokens
        for entry in entries:
            total = self.readable(entry)
            end = chunk_end(entry.computed, total, budget, self.limits.grid)
            if end > entry.computed:
                draws = end == total and not entry.outputs
                budget -= end - entry.computed
                rows.append(self._known_row(entry, end, draws=draws))
        return build_batch(ForwardMode.PREFILL, rows) if rows else None

    def begin(self, entries: Sequence[DecodeEntry]) -> ForwardBatch:
        """The first trees of entries whose drafts have landed with their prompts; nothing else is computed."""
        return build_batch(ForwardMode.PREBUILT, [
            replace(_row(entry, [], draws=False), spec=entry.draft.begin(self.draft_tokens(entry)))
            for entry in entries])

    def _decode_row(self, entry: DecodeEntry) -> Row:
        if not self.limits.speculates:
            return self._known_row(entry, entry.computed + 1, draws=entry.computed == entry.num_tokens - 1)
        row = self._replayed_row(entry) if entry.num_tokens - entry.computed > 1 else self._verified_row(entry)
        if entry.scratch is None or row.spec is None:
            return row
        return replace(row, spec=replace(row.spec, scratch=entry.scratch.slot_id))

    def _known_row(self, entry: DecodeEntry, end: int, *, draws: bool) -> Row:
        """Known tokens up to `end`."""
        row = _row(entry, entry.tokens(entry.computed, end), draws=draws)
        entry.advance(end)
        if not self.limits.speculates:
            return row
        next_token_id = None if draws else entry.tokens(end, end + 1)[0]
        return replace(row, spec=entry.draft.prefill(row.context_len, next_token_id, self.draft_tokens(entry)))

    def _replayed_row(self, entry: DecodeEntry) -> Row:
        """Known tokens of the answer, which all stand, as a chain."""
        count = self._room(entry, min(entry.num_tokens - entry.computed - 1, self.limits.num_draft_tokens + 1))
        end = entry.computed + count
        row = _row(entry, entry.tokens(entry.computed, end), draws=False)
        spec = entry.draft.replay(entry.computed, count, entry.tokens(end, end + 1)[0], self.draft_tokens(entry))
        entry.draft.accepted = AcceptedNodes(entry.computed, tuple(range(count)))
        entry.advance(end)
        return replace(row, spec=spec)

    def _verified_row(self, entry: DecodeEntry) -> Row:
        """The newest token with the tree drafted after it. What counts as computed is known once it is verified."""
        num_left = min(entry.num_left, self.limits.max_context_tokens - entry.num_tokens)
        max_nodes = self._room(entry, 1 + len(entry.draft.tree)) - 1
        tree, spec = entry.draft.verify(entry.computed, max_nodes=max_nodes, max_depth=num_left - 1,
                                        num_draft_tokens=self.draft_tokens(entry))
        newest = entry.tokens(entry.computed, entry.num_tokens)
        return replace(_row(entry, [*newest, *tree.token_ids], draws=True), spec=spec)

    def _room(self, entry: DecodeEntry, wanted: int) -> int:
        """How many of `wanted` more tokens the entry has memory for; takes free pages, but none from others."""
        assert entry.pages is not None
        wanted = 1 if entry.scratch is None else wanted
        missing = pages_for_tokens(entry.computed + wanted, self.limits.page_size) - entry.pages.num_pages
        if 0 < missing <= self.pages.num_free:
            entry.pages.extend(missing)
        return min(wanted, entry.pages.num_pages * self.limits.page_size - entry.computed)


def _row(entry: DecodeEntry, tokens: list[int], *, draws: bool) -> Row:
    assert entry.pages is not None
    assert entry.slot is not None
    sampling = None
    if draws:
        sampling = sampling_row(entry.request, entry.outputs, key=entry.key, known=entry.told, is_only=False)
        if sampling.output is not None:
            entry.told = len(entry.outputs)
    return Row(entry.key, tokens, entry.computed, entry.pages.page_ids, entry.slot.slot_id, sampling)
