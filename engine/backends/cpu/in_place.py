"""Attention over pages where they lie: compiled for the machine, or token by token in plain torch."""

import torch
from torch import Tensor

from engine.kernels.host.compiled import has_kernels
from engine.kernels.host.in_place import attend_in_place
from engine.kernels.host.team import Team
from engine.kernels.rows_in_place import RowsInPlace


def attend(pages: Tensor, q: Tensor, rows: RowsInPlace, scale: float, team: Team) -> Tensor:
    """pages: [P, 2 (k, v), num_kv_heads, page_size, D]; q: [T, num_heads, D] of new tokens whose keys are written.
    Returns the same as q."""
    if has_kernels(pages.dtype):
        return attend_in_place(pages, q.to(pages.dtype).contiguous(), rows, scale, team).to(q.dtype)
    return attend_by_token(pages, q, rows, scale)


def attend_by_token(pages: Tensor, q: Tensor, rows: RowsInPlace, scale: float) -> Tensor:
    """The same one token after the other: slow, in any type, and a token's bits depend on its own keys only."""
    out = torch.empty_like(q)
    for row, first, count in rows.tiles.tolist():
        for token in range(first, first + count):
            cached = _keys_of(pages, rows, row, token)
            keys, values = cached.float()[..., None, :, :].unbind(1)  # [kv, 1, keys, D]
            queries = q[token].float().view(len(keys), -1, 1, q.shape[-1])
            weights = (queries * keys).sum(-1).mul(scale).softmax(-1)
            out[token] = (weights[..., None] * values).sum(-2).view(q.shape[1:])
    return out


def _keys_of(pages: Tensor, rows: RowsInPlace, row: int, token: int) -> Tensor:
    """[kv heads, 2, keys, D]: what the token sees."""
    page_size, num_keys = pages.shape[3], int(rows.positions[token]) + 1
    positions = torch.arange(min(num_keys, int(rows.num_in_order[row])))
    slots = rows.tables[row].long()[positions // page_size] * page_size + positions % page_size
    slots = torch.cat([slots, rows.paths[token, : num_keys - len(slots)]])
    return pages[slots // page_size, :, :, slots % page_size].permute(2, 1, 0, 3)
