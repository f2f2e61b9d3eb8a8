"""The next chunk of a prompt, and its row in a batch."""

from engine.core.draft_trees import SpecRow
from engine.core.rows import Row, chunk_end, sampling_row, scoring_row
from prefill.prompts import PrefillEntry, PrefillLimits, PromptCache

# Scoring needs a row of logits per token: 80 MB for this number at a vocabulary of 150,000.
SCORED_TOKENS = 128


def chunk_of(entry: PrefillEntry, limits: PrefillLimits, budget: int) -> int:
    """Return the end of the next chunk of at most `budget` tokens, in tokens of the prompt.

    It is what is computed already if the budget allows no chunk.
    """
    if entry.request.num_prompt_logprobs is not None:
        budget = min(budget, max(SCORED_TOKENS // limits.grid, 1) * limits.grid)
    return chunk_end(entry.computed, len(entry.request.prompt_token_ids), budget, limits.grid)


def chunk_row(
    entry: PrefillEntry, end: int, limits: PrefillLimits, cache: PromptCache, *, num_spare: int
) -> Row:
    """Return the row of a started prompt from its computed tokens to `end`.

    `num_spare` slots are free for states that are worth caching.
    """
    assert entry.pages is not None
    assert entry.slot is not None
    prompt = entry.request.prompt_token_ids
    sampling = sampling_row(entry.request, (), key=entry.key) if end == len(prompt) else None
    spec = None
    if limits.drafts:
        spec = SpecRow(
            next_token_id=prompt[end] if end < len(prompt) else None,
            draft_start=0 if limits.caches_drafts else entry.num_cached,
            num_draft_tokens=limits.num_draft_tokens,
        )
    return Row(
        entry.key,
        prompt[entry.computed : end],
        entry.computed,
        entry.pages.table,
        entry.slot.slot_id,
        sampling,
        spec,
        scoring_row(entry.request, entry.computed, end),
        cache.states_of(entry, end, num_spare=num_spare),
        entry.request.adapter,
    )
