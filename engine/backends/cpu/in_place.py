"""Few new tokens attend over their rows' pages without gathering them first, in code compiled for the machine."""

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.kernels.host.compiled import has_kernels
from engine.kernels.host.in_place import attend_in_place, compiled_for
from engine.kernels.host.team import Team
from engine.kernels.rows_in_place import RowsInPlace


class InPlace:
    """Over a stage's KV tensors [num_pages, 2, num_kv_heads, page_size, head_dim], at least one, bf16 or fp32."""

    def __init__(self, kv_pools: Mapping[int, Tensor], scale: float) -> None:
        """Compiles what is not compiled yet: seconds in a machine's first process, milliseconds in all later ones."""
        some = next(iter(kv_pools.values()))
        compiled_for(some.dtype)
        self.num_pages = len(some)
        self._pools = kv_pools
        self._scale = scale
        self._team = Team()

    @classmethod
    def over(cls, kv_pools: Mapping[int, Tensor], scale: float) -> "InPlace | None":
        """None where there is nothing to read, or no code for its type."""
        is_readable = bool(kv_pools) and has_kernels(*(pool.dtype for pool in kv_pools.values()))
        return cls(kv_pools, scale) if is_readable else None

    def attend(self, layer_id: int, q: Tensor, rows: RowsInPlace) -> Tensor:
        """q: [T, num_heads, head_dim] of the rows' new tokens, whose keys are written. Returns the same."""
        pool = self._pools[layer_id]
        queries = q.view(len(q), pool.shape[2], -1, q.shape[-1]).to(torch.float32, copy=True).mul_(self._scale)
        return attend_in_place(pool, queries, rows, self._team).view(q.shape).to(q.dtype)
