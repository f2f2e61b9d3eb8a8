"""Batches of a simulated model: lengths without tokens."""

from collections.abc import Sequence

import torch

from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.rows import Row

_NO_TOKENS = torch.empty(0)


def batch_of_lengths(mode: ForwardMode, rows: Sequence[Row]) -> ForwardBatch:
    """Return a batch with the fields that a scheduler reads. It has no tokens, as no model runs."""
    return ForwardBatch(
        mode=mode,
        request_keys=tuple(row.key for row in rows),
        query_lens=tuple(len(row.token_ids) for row in rows),
        context_lens=tuple(row.context_len for row in rows),
        token_ids=_NO_TOKENS,
        positions=_NO_TOKENS,
        page_tables=_NO_TOKENS,
        slot_ids=_NO_TOKENS,
        sampling=tuple(row.sampling for row in rows),
    )
