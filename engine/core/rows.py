"""Conversion of scheduled rows to a complete `ForwardBatch`.

Only this module lays out tokens, positions and page tables.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.batch import (
    ForwardBatch,
    ForwardMode,
    OutputOpening,
    OutputRow,
    SamplingRow,
    ScoringRow,
)
from engine.core.draft_trees import SpecInfo, SpecRow, node_depths
from engine.core.request import Request
from engine.core.state_rows import NO_STATES, StateRow
from runtime.errors import InternalError

# Placeholder for the token of the preceding step, in a batch that is built before its result.
NOT_SAMPLED = -1


class Row(NamedTuple):
    """One request's part of a batch: new tokens, cached tokens, pages and slot."""

    key: int
    token_ids: Sequence[int]
    context_len: int
    page_ids: Sequence[int] | NDArray[np.int32]
    slot_id: int
    sampling: SamplingRow | None  # None: no token is sampled
    spec: SpecRow | None = None  # set in every row of a pool that speculates
    scoring: ScoringRow | None = None
    states: StateRow = NO_STATES
    adapter: str = ""

    @property
    def positions(self) -> Sequence[int]:
        """Return the positions of the tokens: consecutive, or by depth if they form a tree."""
        if self.spec is None or not self.spec.parents:
            return range(self.context_len, self.context_len + len(self.token_ids))
        return [self.context_len + depth for depth in node_depths(self.spec.parents)]


BuildBatch = Callable[[ForwardMode, Sequence[Row]], ForwardBatch]


def build_batch(mode: ForwardMode, rows: Sequence[Row]) -> ForwardBatch:
    """Build a batch of these rows, in this order.

    Page tables are as wide as the longest row.
    """
    token_ids = longs([token for row in rows for token in row.token_ids])
    specs = tuple(row.spec for row in rows if row.spec is not None)
    return ForwardBatch(
        mode=mode,
        request_keys=tuple(row.key for row in rows),
        query_lens=tuple(len(row.token_ids) for row in rows),
        context_lens=tuple(row.context_len for row in rows),
        token_ids=token_ids,
        positions=longs([position for row in rows for position in row.positions]),
        page_tables=_page_tables(rows),
        slot_ids=ints([row.slot_id for row in rows]),
        sampling=tuple(row.sampling for row in rows),
        scoring=tuple(row.scoring for row in rows)
        if any(row.scoring is not None for row in rows)
        else (),
        states=tuple(row.states for row in rows)
        if any(row.states != NO_STATES for row in rows)
        else (),
        adapters=tuple(row.adapter for row in rows) if any(row.adapter for row in rows) else (),
        spec_info=SpecInfo(token_ids, specs) if specs else None,
    )


def longs(values: Sequence[int]) -> Tensor:
    """Return the values as [n] int64.

    The conversion uses numpy: torch takes four times as long for a short list.
    """
    return torch.from_numpy(np.array(values, np.int64))


def ints(values: Sequence[int]) -> Tensor:
    """Return the values as [n] int32."""
    return torch.from_numpy(np.array(values, np.int32))


def _page_tables(rows: Sequence[Row]) -> Tensor:
    """Return [R, P] int32, as wide as the longest row, padded with the null page."""
    tables = np.zeros((len(rows), max((len(row.page_ids) for row in rows), default=1)), np.int32)
    for table, row in zip(tables, rows, strict=True):
        table[: len(row.page_ids)] = row.page_ids
    return torch.from_numpy(tables)


def sampling_row(
    request: Request,
    output_token_ids: Sequence[int],
    *,
    key: int = 0,
    known: int | None = None,
    is_only: bool = True,
    num_due: int = 0,
) -> SamplingRow:
    """Return the inputs for sampling the token after the output and `num_due` unsampled tokens.

    `known` is the number of output tokens that the last stage has under `key`, or None if it has
    nothing. `is_only` means that the last stage need not keep the output.

    Raises:
        InternalError: sampling depends on tokens that are not sampled yet.
    """
    if num_due and request.needs_output:
        raise InternalError(
            f"{request.request_id}: its next token depends on one that is not sampled yet"
        )
    num_tokens = len(output_token_ids) + num_due
    banned = tuple(sorted(request.stop_token_ids)) if num_tokens < request.min_tokens else ()
    position = len(request.prompt_token_ids) + num_tokens
    banned_before = len(request.prompt_token_ids) + request.min_tokens if banned else 0
    output = None
    if request.needs_output:
        opening = None
        if known is None:
            prompt = tuple(request.prompt_token_ids) if request.sampling.needs_history else ()
            opening = OutputOpening(prompt, request.grammar)
        output = OutputRow(key, known or 0, tuple(output_token_ids[known or 0 :]), opening, is_only)
    return SamplingRow(
        request.sampling, position, request.num_top_logprobs, banned, banned_before, output
    )


def scoring_row(request: Request, start: int, end: int) -> ScoringRow | None:
    """Return how to score the prompt tokens `start` to `end` against their successors.

    Return None if the request has no prompt scoring.
    """
    if request.num_prompt_logprobs is None:
        return None
    return ScoringRow(
        tuple(request.prompt_token_ids[start + 1 : end + 1]), request.num_prompt_logprobs
    )


def chunk_end(context_len: int, total: int, budget: int, grid: int) -> int:
    """Return the end of a prefill chunk that starts at `context_len`, given `budget` tokens.

    It is the end of the prompt, or else the last multiple of `grid` within the budget. It is
    `context_len` if the budget reaches no multiple.
    """
    if total - context_len <= budget:
        return total
    end = (context_len + budget) // grid * grid
    return max(end, context_len)
