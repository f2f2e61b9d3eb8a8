"""The prompts of a prefill pool: the events of their streams, their scheduling state, and the cache
of computed prompts.

A page is cached only if it is full, every batch that wrote it succeeded, and stage 0 has the
results. If the model has recurrent states, only states that a batch has returned are cached.
Belongs to the engine thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.core.draft_trees import NO_TREE, TokenTree
from engine.core.request import SampledToken
from engine.core.state_rows import StateRow, StateSnapshot
from engine.memory.layout import NULL_INDEX
from engine.memory.leases import PageLease, SlotLease
from engine.sampling.sampler import Scores
from pool.prefix.cache import PrefixCache
from pool.prefix.tree import Found
from pool.request.entry import Entry, Failed
from pool.request.entry_state import EntryState
from runtime.errors import HandoffError


@dataclass(frozen=True)
class Started:
    """The event that a request has started.

    It names the memory that its prompt will fill. The first `num_cached` tokens are already there.
    """

    page_ids: tuple[int, ...]
    slot_id: int
    queue_s: float
    num_cached: int = 0
    data_rank: int = 0


@dataclass(frozen=True)
class Scored:
    """The event with the scores of one chunk.

    `first_position` is the prompt position of its first token.
    """

    first_position: int
    tokens: Scores


@dataclass(frozen=True)
class FirstToken:
    """The last event: the prompt is computed and its first token sampled.

    `prefill_s` excludes the time in the queue.
    """

    token: SampledToken
    prefill_s: float


PrefillEntryEvent = Started | Scored | FirstToken | Failed
PrefillEmitter = Callable[[PrefillEntryEvent], object]


@dataclass(frozen=True)
class PromptMemory:
    """The memory of a computed prompt, of which the first `num_cached` tokens were cached.

    `draft` is the first tree of a draft model.
    """

    pages: PageLease
    slot: SlotLease
    num_cached: int
    draft: TokenTree


@dataclass
class PrefillEntry(Entry[PrefillEntryEvent]):
    """One prompt on a prefill pool.

    awaited           block that another prompt was computing when this one was last checked
    num_cached        tokens that were cached when it began
    resumed           slot of the state after them, held until the row that copies it is over
    wanted_snapshots  token counts, in order, after which its state is worth caching
    snapshots         the states that rows in flight return, as token count and slot
    """

    awaited: bytes = b""
    num_cached: int = 0
    num_left: int = 0  # blocks that it has put into the cache
    resumed: SlotLease | None = None
    wanted_snapshots: tuple[int, ...] = ()
    snapshots: list[tuple[int, SlotLease]] = field(default_factory=list)
    arrived_s: float = 0.0
    tag: float = 0.0  # of `FairOrder`
    started_s: float = 0.0
    draft: TokenTree = NO_TREE  # proposed after the first token
    has_first_token: bool = False

    def take_memory(self) -> PromptMemory:
        """Return its pages and its slot, which it holds no more.

        Raises:
            HandoffError: the prompt is not computed, or failed, or was released.
        """
        is_computed = self.state is EntryState.COMPUTED and self.has_first_token
        if self.pages is None or self.slot is None or not is_computed:
            raise HandoffError("the prompt is not in this pool's memory any more")
        memory = PromptMemory(self.pages, self.slot, self.num_cached, self.draft)
        self.pages = self.slot = None
        return memory

    def free(self) -> None:
        """Release all of its memory."""
        super().free()
        for lease in (self.resumed, *(lease for _, lease in self.snapshots)):
            if lease is not None:
                lease.end()
        self.resumed = None
        self.snapshots.clear()

    @property
    def remaining(self) -> int:
        return len(self.request.prompt_token_ids) - self.computed

    @property
    def wanted_blocks(self) -> tuple[bytes, ...]:
        """Return the blocks that may come from the cache: none if every token is to be scored."""
        return self.blocks if self.request.num_prompt_logprobs is None else ()

    @property
    def turn(self) -> tuple[int, float, int]:
        """Return the sort key of the queue. Keys grow with arrival."""
        return self.request.priority, self.tag, self.key


@dataclass(frozen=True)
class PrefillLimits:
    """Limits of a prefill scheduler.

    `chunk_tokens` bounds the tokens of one batch. Chunks end on multiples of `grid`, which the
    model sets.

    With `drafts`, a draft model on the last stage prefills the prompts as well. It may propose up
    to `num_draft_tokens` after the first token. Unless `caches_drafts`, cached pages lack its
    state.
    """

    page_size: int
    chunk_tokens: int
    grid: int
    max_running: int
    max_queued: int
    drafts: bool = False
    num_draft_tokens: int = 1
    caches_drafts: bool = True


@dataclass
class PromptCache(PrefixCache):
    """A prefix cache that also knows which prompts are computing which blocks."""

    # Blocks being computed, and the prompt that computes each.
    _coming: dict[bytes, PrefillEntry] = field(default_factory=dict)

    def is_coming(self, entry: PrefillEntry) -> bool:
        """Return whether a prompt of no lower priority computes a block that this one needs."""
        if not self._coming:
            return False
        if entry.awaited not in self._coming:
            there = len(self.found_of(entry).page_ids)
            entry.awaited = next(
                (block for block in entry.wanted_blocks[there:] if block in self._coming), b""
            )
        writer = self._coming.get(entry.awaited)
        return writer is not None and writer.request.priority <= entry.request.priority

    def found_of(self, entry: PrefillEntry) -> Found:
        """Return the cached part of a prompt."""
        return (
            self.find(entry.wanted_blocks, len(entry.request.prompt_token_ids))
            if entry.blocks
            else Found()
        )

    def least_tokens(self, entry: PrefillEntry) -> int:
        """Return the fewest prompt tokens left to compute, whatever gets cached meanwhile."""
        if entry.pages is not None:
            return entry.remaining
        return 0 if self.is_coming(entry) else entry.remaining - self.found_of(entry).num_tokens

    def begin(self, entry: PrefillEntry, found: Found) -> None:
        """Note that a prompt has leased its cached pages and computes the rest."""
        if self.rule is None or not entry.blocks:
            return
        entry.num_cached = found.num_tokens
        entry.wanted_snapshots = found.snapshot_tokens
        self.resume(entry.blocks, found, entry.request.session)
        self.metrics.queried.inc(len(entry.request.prompt_token_ids))
        self.metrics.matched.inc(found.num_tokens)
        self.metrics.reused.inc(found.num_tokens)
        blocks = (
            tuple(entry.blocks[self._num_blocks(count) - 1] for count in found.snapshot_tokens)
            if self.rule.has_states
            else entry.blocks[len(found.page_ids) :]
        )
        if not self._coming.keys().isdisjoint(blocks):
            blocks = tuple(block for block in blocks if block not in self._coming)
        self._coming.update(dict.fromkeys(blocks, entry))

    def states_of(self, entry: PrefillEntry, end: int, *, num_spare: int) -> StateRow:
        """Return what the prompt's next row, up to token `end`, does with recurrent states.

        The row resumes from the cached state if it is the first, and returns the states worth
        caching as long as `num_spare` slots allow.
        """
        resumed = entry.resumed if entry.computed == entry.num_cached else None
        passed = [count for count in entry.wanted_snapshots if count <= end]
        entry.wanted_snapshots = entry.wanted_snapshots[len(passed) :]
        snapshots = []
        for count in passed[: max(num_spare, 0)]:
            lease = self.slots.alloc(owner=entry.owner)
            entry.snapshots.append((count, lease))
            snapshots.append(StateSnapshot(count, lease.slot_id))
        for count in passed[len(snapshots) :]:
            # No other prompt needs to wait for it.
            self._coming.pop(entry.blocks[self._num_blocks(count) - 1], None)
        return StateRow(NULL_INDEX if resumed is None else resumed.slot_id, tuple(snapshots))

    def keep(self, entry: PrefillEntry, page_ids: Sequence[int], num_tokens: int) -> None:
        """Cache the first `num_tokens` of the prompt, which are computed in these pages.

        `num_tokens` is larger than at the previous call.
        """
        if self.rule is None or not entry.blocks:
            return
        if entry.resumed is not None:
            entry.resumed.end()  # the row that copied it is over
        if not self.rule.has_states:
            self._leave(entry, page_ids, min(self._num_blocks(num_tokens), len(entry.blocks)))
        while entry.snapshots and entry.snapshots[0][0] <= num_tokens:
            count, lease = entry.snapshots.pop(0)
            with lease:
                self._leave(entry, page_ids, self._num_blocks(count), lease.slot_id)

    def end(self, entry: PrefillEntry) -> None:
        """Stop announcing the entry's blocks; prompts that wait for them compute them instead."""
        if not self._coming:
            return
        for block in entry.blocks[entry.num_left :]:
            if self._coming.get(block) is entry:
                del self._coming[block]

    def _num_blocks(self, num_tokens: int) -> int:
        assert self.rule is not None
        return num_tokens // self.rule.block_tokens

    def _leave(
        self, entry: PrefillEntry, page_ids: Sequence[int], count: int, slot_id: int | None = None
    ) -> None:
        self.insert(entry.blocks[:count], page_ids, slot_id, session=entry.request.session)
        coming = self._coming
        # Only new blocks are visited: a long prompt has many chunks and even more blocks.
        for block in entry.blocks[entry.num_left : count]:
            coming.pop(block, None)
        entry.num_left = count
