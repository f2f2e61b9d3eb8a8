"""Which keys a token may see when plain causal order is not the answer."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.draft_trees import SpecInfo, ancestors
from runtime.errors import InternalError


def trees_of(batch: ForwardBatch) -> SpecInfo | None:
    """The batch's trees, if it verifies any that are not chains."""
    info = batch.spec_info
    if batch.mode is not ForwardMode.VERIFY or not isinstance(info, SpecInfo) or info.is_chain:
        return None
    return info


def tree_visibility(batch: ForwardBatch) -> tuple[Tensor, ...]:
    """Per row which of its new tokens each of them may see [N, N] bool, True where it may, from the batch's trees;
    nothing where order is causal. Whatever was cached before is seen by all.

    Raises:
        InternalError: a tree of another size than its row.
    """
    info = trees_of(batch)
    return () if info is None else visible_in_trees(info, batch.query_lens)


def visible_in_trees(info: SpecInfo, query_lens: Sequence[int]) -> tuple[Tensor, ...]:
    """The same of any trees, also of chains."""
    for row, (spec, query_len) in enumerate(zip(info.rows, query_lens, strict=True)):
        if len(spec.parents) != query_len:
            raise InternalError(f"the tree of row {row} has {len(spec.parents)} nodes, the row {query_len} new tokens")
    return tuple(_ancestors_visible(row.parents) for row in info.rows)


def _ancestors_visible(parents: tuple[int, ...]) -> Tensor:
    """[N, N] bool: each node sees its ancestors and itself."""
    if all(parent < 0 for parent in parents):
        return torch.eye(len(parents), dtype=torch.bool)
    visible = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node in range(len(parents)):
        visible[node, list(ancestors(parents, node))] = True
    return visible
