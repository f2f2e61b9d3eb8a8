"""Draft batches: rows that replay accepted target tokens, and rows that extend the draft tree."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.draft_trees import CarriedKeys, SpecInfo
from engine.core.rows import longs
from engine.memory.layout import NULL_INDEX
from engine.speculative.contracts.verify import AcceptedRun
from runtime.errors import InternalError


@dataclass(frozen=True)
class FollowedRow:
    """The slots by which one row of the draft is extended.

    `features` are the tokens of the batch whose features the slots read, and `next_tokens` the
    tokens after them. `position` is that of the first slot. `num_nodes` is the node limit of the
    row's next tree (0: no tree).
    """

    row: int
    features: list[int]
    next_tokens: list[int]
    position: int
    num_nodes: int


def followed_rows(batch: ForwardBatch, runs: Sequence[AcceptedRun]) -> list[FollowedRow]:
    """Return the rows that the draft follows, with their accepted tokens.

    Raises:
        InternalError: the batch carries no speculation, or a row lacks its next token.
    """
    if not batch.num_rows:
        return []
    info = batch.spec_info
    if not isinstance(info, SpecInfo):
        raise InternalError("a draft can follow only batches that carry speculation")
    tokens = info.token_ids.tolist()
    by_row = {run.row: run for run in runs}
    found = []
    first = 0
    for row, (length, context_len, spec) in enumerate(
        zip(batch.query_lens, batch.context_lens, info.rows, strict=True)
    ):
        run = by_row.get(row)
        if spec.num_draft_tokens is not None:
            nodes = list(range(length))
            after = tokens[first + 1 : first + length]
            if run is not None and batch.mode is ForwardMode.VERIFY:
                nodes = list(run.accepted)
                after = [token.token_id for token in run.tokens[:-1]]
            last = spec.next_token_id if run is None else run.tokens[-1].token_id
            if last is None or context_len < spec.draft_start:
                raise InternalError(
                    f"row {row} at {context_len} neither samples nor names the token after it, or its "
                    f"draft starts at {spec.draft_start}"
                )
            found.append(
                FollowedRow(
                    row,
                    [first + node for node in nodes],
                    [*after, last],
                    context_len,
                    0 if run is None else spec.num_draft_tokens,
                )
            )
        first += length
    return found


def extend_batch(
    batch: ForwardBatch, followed: Sequence[FollowedRow], page_size: int
) -> ForwardBatch:
    """Return the batch in which the draft follows the target.

    The draft's slots are counted from its first one, in the page of that position. Positions stay
    those of the target. So a draft that starts again in the middle of a response writes no page of
    the prompt, which other requests may share.
    """
    info = batch.spec_info
    assert isinstance(info, SpecInfo)
    tables = batch.page_tables
    slots = batch.slot_ids
    rows = [row.row for row in followed]
    if rows != list(range(batch.num_rows)):
        tables = tables[rows]
        slots = slots[rows]
    starts = [info.rows[row.row].draft_start for row in followed]
    return ForwardBatch(
        mode=ForwardMode.DRAFT,
        request_keys=tuple(batch.request_keys[row.row] for row in followed),
        query_lens=tuple(len(row.features) for row in followed),
        context_lens=tuple(
            row.position - start for row, start in zip(followed, starts, strict=True)
        ),
        token_ids=longs([token for row in followed for token in row.next_tokens]),
        positions=longs(
            [row.position + place for row in followed for place in range(len(row.features))]
        ),
        page_tables=_from_page(tables, [start // page_size for start in starts]),
        slot_ids=slots,
        sampling=(None,) * len(followed),
        spec_info=CarriedKeys(),
    )


def _from_page(tables: Tensor, first: Sequence[int]) -> Tensor:
    """Return the page tables [R, pages], each row shifted to begin at its page `first[row]`."""
    if not any(first):
        return tables
    columns = torch.arange(tables.shape[1]) + torch.tensor(first)[:, None]
    beyond = (columns >= tables.shape[1]).to(tables.device)
    return tables.gather(1, columns.clamp(max=tables.shape[1] - 1).to(tables.device)).masked_fill(
        beyond, NULL_INDEX
    )


def row_ends(batch: ForwardBatch) -> Tensor:
    """Return the index of each row's last token, [R] int64."""
    return longs(list(accumulate(batch.query_lens, initial=-1))[1:])


def round_batch(
    rows: ForwardBatch,
    slots: Sequence[int],
    positions: Tensor,
    width: int,
    keys: Tensor | None = None,
) -> ForwardBatch:
    """Return the batch of a round: `width` branches per row, at the slot after its last one.

    Each step sets tokens and positions. `positions` is [R]; for `keys` see `CarriedKeys.chosen_by`.
    Only chains carry keys, because the branches of a tree change places between steps.
    """
    return ForwardBatch(
        mode=ForwardMode.DRAFT,
        request_keys=rows.request_keys,
        query_lens=(width,) * rows.num_rows,
        context_lens=tuple(slots),
        token_ids=None,
        positions=positions if width == 1 else positions.repeat_interleave(width),
        page_tables=rows.page_tables,
        slot_ids=rows.slot_ids,
        sampling=(None,) * rows.num_rows,
        spec_info=CarriedKeys.chosen_by(keys) if width == 1 else None,
    )
