"""Choosing keys by score (DSA): the one tie rule, and how a choice is written down."""

import torch
from torch import Tensor


def best_positions(scores: Tensor, hidden: Tensor, count: int) -> Tensor:
    """Positions of each row's `count` largest scores, ascending; of equal scores the earlier
    positions.

    scores: [rows, keys], -inf where hidden; hidden: [rows, keys] bool. Returns [rows, count] int32;
    -1 fills up.
    """
    threshold = scores.topk(count, dim=-1).values[:, -1:]
    above = scores > threshold
    equal = (scores == threshold) & ~hidden
    free = count - above.sum(-1, keepdim=True)
    return true_positions(above | (equal & (equal.cumsum(-1) <= free)), count)


def true_positions(chosen: Tensor, width: int) -> Tensor:
    """Where each row of a mask is True: [rows, width] int32, ascending, then -1. So the keys of a
    tree's path lie side by side, as they will once the path is accepted."""
    place = torch.where(chosen, chosen.cumsum(-1) - 1, width)
    positions = torch.arange(chosen.shape[1], dtype=torch.int32, device=chosen.device).expand_as(
        chosen
    )
    out = torch.full((len(chosen), width + 1), -1, dtype=torch.int32, device=chosen.device)
    return out.scatter_(1, place, positions)[:, :width]
