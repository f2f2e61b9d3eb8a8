"""Commits of accepted tree nodes.

A commit moves their cache entries to the positions at which plain decoding would have stored them.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.core.batch import ForwardBatch
from engine.core.draft_trees import SpecInfo, SpecRow


def commit_kv(pools: Mapping[int, Tensor], batch: ForwardBatch, page_size: int) -> None:
    """Move the entries that the rows accepted in their last verification (`SpecRow.accepted`).

    Each layer's pages are [num_pages, 2, num_kv_heads, page_size, head_dim]. Chains need no move.
    """
    moves = _all_moves(batch, page_size)
    if moves is None or not pools:
        return
    from_pages, from_offsets, to_pages, to_offsets = moves.to(next(iter(pools.values())).device)
    for pool in pools.values():
        pool[to_pages, :, :, to_offsets] = pool[from_pages, :, :, from_offsets]


def commit_entries(pools: Sequence[Tensor], batch: ForwardBatch, page_size: int) -> None:
    """Move accepted entries in pages [num_pages, page_size, dim] of one entry per token."""
    moves = _all_moves(batch, page_size)
    if moves is None or not pools:
        return
    from_pages, from_offsets, to_pages, to_offsets = moves.to(pools[0].device)
    for pool in pools:
        pool[to_pages, to_offsets] = pool[from_pages, from_offsets]


def _all_moves(batch: ForwardBatch, page_size: int) -> Tensor | None:
    """Return the moves, [4 (from page, offset, to page, offset), n] int64, or None without any."""
    rows = batch.spec_info.rows if isinstance(batch.spec_info, SpecInfo) else ()
    moves = [
        move
        for row, spec in enumerate(rows)
        if spec.accepted is not None
        for move in _moves(spec, batch.page_tables[row].tolist(), page_size)
    ]
    return torch.tensor(moves).t() if moves else None


def _moves(spec: SpecRow, pages: list[int], page_size: int) -> list[tuple[int, int, int, int]]:
    """Return (from page, offset, to page, offset) of each accepted node that must move."""
    accepted = spec.accepted
    moves = []
    assert accepted is not None
    for depth, node in enumerate(accepted.nodes):
        if node != depth:
            source = divmod(accepted.context_len + node, page_size)
            place = divmod(accepted.context_len + depth, page_size)
            moves.append((pages[source[0]], source[1], pages[place[0]], place[1]))
    return moves
