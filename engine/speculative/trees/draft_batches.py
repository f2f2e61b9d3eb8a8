"""The batches of a draft: rows that follow what stands of the target's, and rows that grow trees
behind it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.draft_trees import CarriedKeys, SpecInfo
from engine.core.rows import longs
from engine.memory.layout import NULL_INDEX
from engine.speculative.contracts.verify import Run
from runtime.errors import InternalError


@dataclass(frozen=True)
class FollowedRow:
    """One row's slots to extend by: tokens of the batch whose features they read, the tokens after
    them, the position of the first, and how many nodes its next tree may have (0: no tree)."""

    row: int
    features: list[int]
    next_tokens: list[int]
    position: int
    num_nodes: int


def followed_rows(batch: ForwardBatch, runs: Sequence[Run]) -> list[FollowedRow]:
    """The rows the draft follows, with the tokens that stand."""
    if not batch.num_rows:
        return []
    info = batch.spec_info
    if not isinstance(info, SpecInfo):
        raise InternalError("a draft can follow only batches that carry speculation")
    tokens, by_row = info.token_ids.tolist(), {run.row: run for run in runs}
    found, first = [], 0
    for row, (length, context_len, spec) in enumerate(
        zip(batch.query_lens, batch.context_lens, info.rows, strict=True)
    ):
        run = by_row.get(row)
        if spec.num_draft_tokens is not None:
            nodes, after = list(range(length)), tokens[first + 1 : first + length]
            if run is not None and batch.mode is ForwardMode.VERIFY:
                nodes, after = list(run.accepted), [token.token_id for token in run.tokens[:-1]]
            last = spec.next_token_id if run is None else run.tokens[-1].token_id
            if last is None or context_len < spec.draft_start:
                raise InternalError(
                    f"row {row} at {context_len} neither draws nor names the token after it, or its "
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
    """The draft's slots are counted from the first it has, in the page of that position; positions
    stay the target's. A draft that begins anew in mid-answer so writes no page of the prompt, which
    other requests may read."""
    info = batch.spec_info
    assert isinstance(info, SpecInfo)
    tables, slots, rows = batch.page_tables, batch.slot_ids, [row.row for row in followed]
    if rows != list(range(batch.num_rows)):
        tables, slots = tables[rows], slots[rows]
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
    """Each row of page tables [R, pages] from its page of that number on."""
    if not any(first):
        return tables
    columns = torch.arange(tables.shape[1]) + torch.tensor(first)[:, None]
    beyond = (columns >= tables.shape[1]).to(tables.device)
    return tables.gather(1, columns.clamp(max=tables.shape[1] - 1).to(tables.device)).masked_fill(
        beyond, NULL_INDEX
    )


def row_ends(batch: ForwardBatch) -> Tensor:
    """[R] int64, each row's last token."""
    return longs(list(accumulate(batch.query_lens, initial=-1))[1:])


def round_batch(
    rows: ForwardBatch,
    slots: Sequence[int],
    positions: Tensor,
    width: int,
    keys: Tensor | None = None,
) -> ForwardBatch:
    """A row's `width` branches at the slot after its last; each step sets tokens and positions.
    positions: [R]; keys: see `CarriedKeys.chosen_by`. Only chains carry keys: the branches of a
    tree change places between steps."""
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
