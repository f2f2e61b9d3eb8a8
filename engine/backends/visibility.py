"""Which keys a token may see when plain causal order is not the answer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.draft_trees import SpecInfo, ancestors


@dataclass(frozen=True)
class TreeMask:
    """Visibility of draft tokens, as `spec_info` of VERIFY and DRAFT batches.

    visible     one [query_len, width] bool tensor per row; True where the new token may see the key. The columns are
                the row's last `width` keys in storage order, the new tokens last, so query_len <= width. Every
                earlier key is committed and visible to all. Each token must see itself.
    """

    visible: tuple[Tensor, ...]


def tree_mask(batch: ForwardBatch) -> TreeMask | None:
    """The mask a batch brings, if its mode has any."""
    if batch.mode in (ForwardMode.VERIFY, ForwardMode.DRAFT) and isinstance(batch.spec_info, TreeMask):
        return batch.spec_info
    return None


def trees_of(batch: ForwardBatch) -> SpecInfo | None:
    """The batch's trees, if it verifies any that are not chains."""
    info = batch.spec_info
    if batch.mode is not ForwardMode.VERIFY or not isinstance(info, SpecInfo) or info.is_chain:
        return None
    return info


def tree_visibility(batch: ForwardBatch) -> tuple[Tensor, ...]:
    """Per row which of its last keys each new token may see, as in `TreeMask`, from the batch's mask or its trees;
    nothing where order is causal."""
    mask, info = tree_mask(batch), trees_of(batch)
    if mask is not None:
        return mask.visible
    return () if info is None else visible_in_trees(info)


def visible_in_trees(info: SpecInfo) -> tuple[Tensor, ...]:
    """The same of any trees, also of chains."""
    return tuple(_ancestors_visible(row.parents) for row in info.rows)


def _ancestors_visible(parents: tuple[int, ...]) -> Tensor:
    """[N, N] bool: each node sees its ancestors and itself."""
    if all(parent < 0 for parent in parents):
        return torch.eye(len(parents), dtype=torch.bool)
    visible = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node in range(len(parents)):
        visible[node, list(ancestors(parents, node))] = True
    return visible
