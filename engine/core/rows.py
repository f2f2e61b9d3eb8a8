"""From scheduled rows to a complete `ForwardBatch`: the one place that lays out tokens, positions
and page tables."""

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

NOT_DRAWN = (
    -1
)  # in place of the token that the step before draws, in a batch that is made before its result


class Row(NamedTuple):
    """One request's part of a batch: its new tokens, what is cached already, and where."""

    key: int
    token_ids: Sequence[int]
    context_len: int
    page_ids: Sequence[int] | NDArray[np.int32]
    slot_id: int
    sampling: SamplingRow | None  # None: no token is drawn
    spec: SpecRow | None = None  # on a pool that speculates; then every row has one
    scoring: ScoringRow | None = None
    states: StateRow = NO_STATES

    @property
    def positions(self) -> Sequence[int]:
        """In order, or by depth where the tokens are a tree."""
        if self.spec is None or not self.spec.parents:
            return range(self.context_len, self.context_len + len(self.token_ids))
        return [self.context_len + depth for depth in node_depths(self.spec.parents)]


BuildBatch = Callable[[ForwardMode, Sequence[Row]], ForwardBatch]


def build_batch(mode: ForwardMode, rows: Sequence[Row]) -> ForwardBatch:
    """A batch of these rows, in this order; page tables are as wide as the longest row needs."""
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
        spec_info=SpecInfo(token_ids, specs) if specs else None,
    )


def longs(values: Sequence[int]) -> Tensor:
    """[n] int64. By way of numpy: torch takes four times as long over a short list."""
    return torch.from_numpy(np.array(values, np.int64))


def ints(values: Sequence[int]) -> Tensor:
    """[n] int32, likewise."""
    return torch.from_numpy(np.array(values, np.int32))


def _page_tables(rows: Sequence[Row]) -> Tensor:
    """[R, P] int32, as wide as the longest row, padded with the null page."""
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
    """How the token after `output_token_ids`, and `num_due` that are not drawn yet, is drawn.
    `known`: tokens of the output that the last stage has under `key`, None where it has nothing;
    `is_only`: it needs to keep nothing.

    Raises:
        InternalError: tokens are due that drawing depends on.
    """
    if num_due and request.needs_output:
        raise InternalError(
            f"{request.request_id}: its next token depends on one that is not drawn yet"
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
    """How the prompt tokens `start` to `end` are scored against those after them; None if it was
    not requested."""
    if request.num_prompt_logprobs is None:
        return None
    return ScoringRow(
        tuple(request.prompt_token_ids[start + 1 : end + 1]), request.num_prompt_logprobs
    )


def chunk_end(context_len: int, total: int, budget: int, grid: int) -> int:
    """Where a prefill chunk that starts at `context_len` ends, given `budget` tokens: the end of
    the prompt, or the last multiple of `grid` it reaches; `context_len` itself if it reaches
    none."""
    if total - context_len <= budget:
        return total
    end = (context_len + budget) // grid * grid
    return max(end, context_len)
