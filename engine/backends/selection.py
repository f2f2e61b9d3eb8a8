"""Selection of keys by score (DSA): the tie rule, and the form of a selection."""

import torch
from torch import Tensor


def best_positions(scores: Tensor, hidden: Tensor, count: int) -> Tensor:
    """Return the positions of each row's `count` largest scores, ascending.

    Of equal scores the earlier positions win. scores is [rows, keys], -inf for hidden keys; hidden
    is [rows, keys] bool. The result is [rows, count] int32, padded with -1.
    """
    threshold = scores.topk(count, dim=-1).values[:, -1:]
    above = scores > threshold
    equal = (scores == threshold) & ~hidden
    free = count - above.sum(-1, keepdim=True)
    return true_positions(above | (equal & (equal.cumsum(-1) <= free)), count)


def true_positions(chosen: Tensor, width: int) -> Tensor:
    """Return the True positions of each row of a mask, [rows, width] int32, padded with -1.

    The positions are ascending. The keys of a tree's path are then adjacent, as they will be after
    the path is accepted.
    """
    place = torch.where(chosen, chosen.cumsum(-1) - 1, width)
    positions = torch.arange(chosen.shape[1], dtype=torch.int32, device=chosen.device).expand_as(
        chosen
    )
    out = torch.full((len(chosen), width + 1), -1, dtype=torch.int32, device=chosen.device)
    return out.scatter_(1, place, positions)[:, :width]
