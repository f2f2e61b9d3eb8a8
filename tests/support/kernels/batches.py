"""Hand-made batches for tests of the device side."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.draft_trees import SpecInfo


@dataclass(frozen=True)
class Row:
    """One request's share of a batch."""

    query_len: int
    context_len: int = 0
    pages: tuple[int, ...] = ()
    slot: int = 0


def make_batch(
    mode: ForwardMode,
    rows: Sequence[Row],
    *,
    spec_info: SpecInfo | None = None,
    table_width: int = 0,
) -> ForwardBatch:
    """Build a batch of these rows; page tables are padded with the null page to `table_width` or
    the longest row."""
    width = max([table_width, 1, *(len(row.pages) for row in rows)])
    tables = [[*row.pages, *[0] * (width - len(row.pages))] for row in rows]
    positions = [torch.arange(row.context_len, row.context_len + row.query_len) for row in rows]
    flat = torch.cat(positions) if positions else torch.empty(0, dtype=torch.long)
    return ForwardBatch(
        mode=mode,
        request_keys=tuple(range(len(rows))),
        query_lens=tuple(row.query_len for row in rows),
        context_lens=tuple(row.context_len for row in rows),
        token_ids=torch.zeros(len(flat), dtype=torch.long),
        positions=flat,
        page_tables=torch.tensor(tables, dtype=torch.int32).view(len(rows), width),
        slot_ids=torch.tensor([row.slot for row in rows], dtype=torch.int32),
        sampling=(None,) * len(rows),
        spec_info=spec_info,
    )
