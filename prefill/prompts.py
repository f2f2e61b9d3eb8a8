"""The prompts of a prefill pool: the events that their streams get, the scheduler's state of each,
and those that were read, kept page by page for prompts that begin alike.

Only what stage 0 has the result of is kept: full pages, of which every batch succeeded, and where
the model has recurrent states those that a batch has handed out. Belongs to the engine thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.core.request import DrawnToken
from engine.core.state_rows import Snapshot, StateRow
from engine.memory.layout import NULL_INDEX
from engine.memory.leases import SlotLease
from engine.sampling.sampler import Scores
from pool.prefix.tree import Found
from pool.request.entry import Entry, Failed, PrefixCache


@dataclass(frozen=True)
class Started:
    """The request's turn has come; this is the memory its prompt will fill, whose first
    `num_cached` tokens are there already."""

    page_ids: tuple[int, ...]
    slot_id: int
    queue_s: float
    num_cached: int = 0
    data_rank: int = 0


@dataclass(frozen=True)
class Scored:
    """What the model made of one chunk's tokens, the first of which stands at `first_position` of
    the prompt."""

    first_position: int
    tokens: Scores


@dataclass(frozen=True)
class FirstToken:
    """The prompt is computed, which took `prefill_s`, its time in the queue left out. Nothing
    follows."""

    token: DrawnToken
    prefill_s: float


Event = Started | Scored | FirstToken | Failed
Emit = Callable[[Event], object]


@dataclass
class PrefillEntry(Entry[Event]):
    """One prompt. `awaited` is the block that another prompt was computing when this one was looked
    at last.

    Its first `num_cached` tokens were there when it began, and the state after them in the slot
    `resumed`, which is held until the row that copies it is over. `wanted_snapshots`: after so many
    tokens, in order, its states are worth keeping; `snapshots`: those that rows in flight hand out,
    and where.
    """

    awaited: bytes = b""
    num_cached: int = 0
    num_left: int = 0  # blocks that others have from it
    resumed: SlotLease | None = None
    wanted_snapshots: tuple[int, ...] = ()
    snapshots: list[tuple[int, SlotLease]] = field(default_factory=list)
    arrived_s: float = 0.0
    started_s: float = 0.0

    def free(self) -> None:
        """Give everything back."""
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
        """Those it need not compute if they are there: none where every token is to be scored."""
        return self.blocks if self.request.num_prompt_logprobs is None else ()

    @property
    def turn(self) -> tuple[int, int]:
        """Less is sooner: keys grow with arrival."""
        return self.request.priority, self.key


@dataclass(frozen=True)
class PrefillLimits:
    """`chunk_tokens` bounds the tokens of one batch; `grid` is the model's (chunks end on its
    multiples). With `drafts` a draft on the last stage reads the prompts too."""

    page_size: int
    chunk_tokens: int
    grid: int
    max_running: int
    max_queued: int
    drafts: bool = False


@dataclass
class PromptCache(PrefixCache):
    """With who is reading what now."""

    _coming: dict[bytes, PrefillEntry] = field(
        default_factory=dict
    )  # block, and who makes it one to go on from

    def is_coming(self, entry: PrefillEntry) -> bool:
        """Whether a prompt that is no less urgent computes right now what this one could go on
        from."""
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
        """What there is of a prompt."""
        return (
            self.find(entry.wanted_blocks, len(entry.request.prompt_token_ids))
            if entry.blocks
            else Found()
        )

    def begin(self, entry: PrefillEntry, found: Found) -> None:
        """A prompt has leased the pages that were found of it, and computes the rest."""
        if self.rule is None or not entry.blocks:
            return
        entry.num_cached, entry.wanted_snapshots = found.num_tokens, found.snapshot_tokens
        self.resume(entry.blocks, found)
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
        """What the prompt's next row, up to token `end`, does with states: it goes on from the one
        that was found, and hands out those that are worth keeping, as far as `num_spare` slots
        allow."""
        resumed = entry.resumed if entry.computed == entry.num_cached else None
        passed = [count for count in entry.wanted_snapshots if count <= end]
        entry.wanted_snapshots = entry.wanted_snapshots[len(passed) :]
        snapshots = []
        for count in passed[: max(num_spare, 0)]:
            lease = self.slots.alloc(owner=entry.owner)
            entry.snapshots.append((count, lease))
            snapshots.append(Snapshot(count, lease.slot_id))
        for count in passed[len(snapshots) :]:
            self._coming.pop(
                entry.blocks[self._num_blocks(count) - 1], None
            )  # nobody need wait for it
        return StateRow(NULL_INDEX if resumed is None else resumed.slot_id, tuple(snapshots))

    def keep(self, entry: PrefillEntry, page_ids: Sequence[int], num_tokens: int) -> None:
        """So many tokens of the prompt are computed, in these pages: more than at the last time."""
        if self.rule is None or not entry.blocks:
            return
        if entry.resumed is not None:
            entry.resumed.end()  # the row that began with it is over
        if not self.rule.has_states:
            self._leave(entry, page_ids, min(self._num_blocks(num_tokens), len(entry.blocks)))
        while entry.snapshots and entry.snapshots[0][0] <= num_tokens:
            count, lease = entry.snapshots.pop(0)
            with lease:
                self._leave(entry, page_ids, self._num_blocks(count), lease.slot_id)

    def end(self, entry: PrefillEntry) -> None:
        """It computes no more: who waits for it has to do so."""
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
        self.insert(entry.blocks[:count], page_ids, slot_id)
        coming = self._coming
        for block in entry.blocks[
            entry.num_left : count
        ]:  # a long prompt has many chunks, and more blocks
            coming.pop(block, None)
        entry.num_left = count
