"""The batches of a decode pool. A row has one token, a tree to verify, or replayed tokens.

Building a row counts its tokens as computed. `DecodeTurns` chooses the requests that take a step.
Belongs to the engine thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from decode.draft_costs import DraftCosts
from decode.entry import DecodeEntry, DecodeLimits
from decode.proposers import Proposers
from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.draft_trees import AcceptedNodes
from engine.core.rows import NOT_SAMPLED, Row, build_batch, chunk_end, sampling_row
from engine.memory.leases import PageAllocator, pages_for_tokens
from pool.request.entry_state import EntryState

# Returns those of the entries that take the next step, each with a page for its token.
Stepping = Callable[[Sequence[DecodeEntry]], list[DecodeEntry]]


@dataclass(frozen=True)
class StepBuilder:
    """Rows and batches of the entries that are scheduled.

    `draft_tokens(entry)` is the largest number of nodes of its next tree; None if its draft model
    does not follow.
    """

    limits: DecodeLimits
    pages: PageAllocator
    draft_tokens: Callable[[DecodeEntry], int | None]
    costs: DraftCosts

    @cached_property
    def _proposers(self) -> Proposers:
        return Proposers(self.limits, self.costs, self.draft_tokens)

    def next(self, ready: Sequence[DecodeEntry], stepping: Stepping) -> ForwardBatch | None:
        """Build a batch of the entries that are `ready`, or return None if none takes a step.

        Known tokens go first, then the first trees of drafts that came with prompts, then steps. A
        pool that speculates replays before other steps.
        """
        reading = [entry for entry in ready if entry.computed < self.readable(entry)]
        if reading:
            return self._reading_batch(reading, ready, stepping)
        beginning = [
            entry
            for entry in ready
            if entry.draft.has_prompt_state and entry.num_left > 1 and self.draft_tokens(entry)
        ]
        if beginning:
            return self.begin(beginning)
        if self.limits.speculates and self.limits.replay_tokens > 1:
            replaying = [entry for entry in ready if entry.num_tokens - entry.computed > 1]
            if replaying and (chosen := stepping(replaying)):
                return self.replay(chosen)
        chosen = stepping(ready)
        return self.decode(chosen) if chosen else None

    def _reading_batch(
        self,
        reading: Sequence[DecodeEntry],
        ready: Sequence[DecodeEntry],
        stepping: Stepping,
    ) -> ForwardBatch | None:
        """Build a batch that prefills, with the steps of streams if both fit into one batch.

        Growing the streams may preempt entries of `reading`.
        """
        streams = [entry for entry in ready if entry.computed >= self.readable(entry)]
        beside = stepping(streams) if self.limits.reads_beside else []
        reading = [entry for entry in reading if entry.state is EntryState.RUNNING]
        if reading:
            return self.read(reading, beside)
        return self.decode(beside) if beside else None

    def decode(self, entries: Sequence[DecodeEntry]) -> ForwardBatch:
        """Build one step of entries whose prompts are computed and whose next token has a page."""
        if not self.limits.speculates:
            rows = [self._next_row(entry, len(entries)) for entry in entries]
            is_replay = any(len(row.token_ids) > 1 for row in rows)
            return build_batch(ForwardMode.REPLAY if is_replay else ForwardMode.DECODE, rows)
        rows = [self._drafting_row(entry) for entry in entries]
        # A batch without any tree is plain decoding. It writes tokens to their final place and
        # leaves nothing to commit.
        if any(len(row.token_ids) > 1 for row in rows):
            return build_batch(ForwardMode.VERIFY, rows)
        for entry in entries:
            entry.draft.accepted = None
        return build_batch(ForwardMode.DECODE, rows)

    def replay(self, entries: Sequence[DecodeEntry]) -> ForwardBatch:
        """Build a batch of known output tokens on a pool that speculates.

        It has no trees, whose nodes would keep their states elsewhere.
        """
        rows = [self._next_row(entry, len(entries)) for entry in entries]
        for entry in entries:
            entry.draft.accepted = None
        return build_batch(ForwardMode.REPLAY, rows)

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
        rows = [self._next_row(entry, len(beside)) for entry in beside]
        budget = self.limits.chunk_tokens
        for entry in entries:
            total = self.readable(entry)
            end = chunk_end(entry.computed, total, budget, self.limits.grid)
            if end > entry.computed:
                samples = end == total and not entry.outputs
                budget -= end - entry.computed
                rows.append(self._known_row(entry, end, samples=samples))
        return build_batch(ForwardMode.PREFILL, rows)

    def begin(self, entries: Sequence[DecodeEntry]) -> ForwardBatch:
        """Build a batch that only grows the first trees of drafts that came with the prompts."""
        return build_batch(
            ForwardMode.PREBUILT,
            [
                _row(entry, [], samples=False)._replace(
                    spec=entry.draft.begin(self.draft_tokens(entry))
                )
                for entry in entries
            ],
        )

    def _next_row(self, entry: DecodeEntry, num_rows: int) -> Row:
        """Return a row of the token that is due, or of known output tokens before it.

        `num_rows` rows share the tokens of a step.
        """
        num_next = entry.num_tokens + entry.num_due - entry.computed
        most = min(self.limits.replay_tokens, self.limits.chunk_tokens // num_rows)
        count = 1 if num_next == 1 or most < 2 else self._room(entry, min(num_next, most))
        return self._known_row(entry, entry.computed + count, samples=count == num_next)

    def _drafting_row(self, entry: DecodeEntry) -> Row:
        if entry.num_tokens - entry.computed > 1:
            return self._replayed_row(entry)
        return self._verified_row(entry)

    def _known_row(self, entry: DecodeEntry, end: int, *, samples: bool) -> Row:
        """Return a row for the known tokens up to `end`, or for the token that is due."""
        row = _row(
            entry,
            [NOT_SAMPLED] if entry.num_due else entry.tokens(entry.computed, end),
            samples=samples,
        )
        entry.advance(end)
        if not self.limits.speculates:
            return row
        next_token_id = None if samples else entry.tokens(end, end + 1)[0]
        return row._replace(
            spec=entry.draft.prefill(row.context_len, next_token_id, self.draft_tokens(entry))
        )

    def _replayed_row(self, entry: DecodeEntry) -> Row:
        """Return a row that replays known output tokens as a chain."""
        most = 1 if entry.scratch is None else self.limits.num_draft_tokens + 1
        count = self._room(entry, min(entry.num_tokens - entry.computed - 1, most))
        end = entry.computed + count
        row = _row(entry, entry.tokens(entry.computed, end), samples=False)
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
        num_drafted = self._proposers.propose(entry)
        has_tree = entry.scratch is not None and bool(entry.draft.tree)
        max_nodes = self._room(entry, 1 + len(entry.draft.tree)) - 1 if has_tree else 0
        tree, spec = entry.draft.verify(
            entry.computed,
            max_nodes=max_nodes,
            max_depth=num_left - 1,
            num_draft_tokens=num_drafted,
            scratch=entry.scratch_id,
        )
        newest = entry.tokens(entry.computed, entry.num_tokens)
        return _row(entry, [*newest, *tree.token_ids], samples=True)._replace(spec=spec)

    def _room(self, entry: DecodeEntry, wanted: int) -> int:
        """Return how many of `wanted` more tokens the entry has memory for.

        Takes free pages if needed, but none from other requests.
        """
        assert entry.pages is not None
        missing = (
            pages_for_tokens(entry.computed + wanted, self.limits.page_size) - entry.pages.num_pages
        )
        if 0 < missing <= self.pages.num_available:
            entry.pages.extend(missing)
        return min(wanted, entry.pages.num_pages * self.limits.page_size - entry.computed)


def _row(entry: DecodeEntry, tokens: list[int], *, samples: bool) -> Row:
    assert entry.pages is not None
    assert entry.slot is not None
    sampling = None
    if samples:
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
    return Row(
        entry.key,
        tokens,
        entry.computed,
        entry.pages.table,
        entry.slot.slot_id,
        sampling,
        adapter=entry.request.adapter,
    )
