"""The simplest attention backend that keeps the contract: one token, one head at a time, straight
from the pool."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.contracts.attention import AttentionGeometry
from engine.core.batch import ForwardBatch
from engine.core.draft_trees import SpecInfo, ancestors
from runtime.errors import InternalError, StalePlanError


@dataclass(frozen=True)
class _Rows:
    """Per token: its page and offset, and the (page, offset) pairs it sees."""

    num_rows: int
    own: tuple[tuple[int, int], ...]
    seen: tuple[tuple[tuple[int, int], ...], ...]


class DenseAttention:
    """Slow and obvious."""

    def __init__(self, *, kv_pools: dict[int, Tensor], geometry: AttentionGeometry) -> None:
        self._pools = kv_pools
        self._geometry = geometry

    def plan(self, batch: ForwardBatch, *, replan_equivalent: bool = False) -> None:
        own, seen = [], []
        for row, (query_len, context_len) in enumerate(
            zip(batch.query_lens, batch.context_lens, strict=True)
        ):
            places = [
                divmod(key, self._geometry.page_size) for key in range(context_len + query_len)
            ]
            cells = [(int(batch.page_tables[row, page]), offset) for page, offset in places]
            for token in range(query_len):
                own.append(cells[context_len + token])
                seen.append(
                    tuple(
                        cell for key, cell in enumerate(cells) if self._sees(batch, row, token, key)
                    )
                )
        plan = _Rows(batch.num_rows, tuple(own), tuple(seen))
        batch.mark_forward_metadata_ready(self, plan=plan, replan_equivalent=replan_equivalent)

    def run(
        self,
        layer_id: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: ForwardBatch,
        *,
        sinks: Tensor | None = None,
    ) -> Tensor:
        plan, geometry = batch.forward_metadata_plan, self._geometry
        if batch.forward_metadata_planner is not self or not isinstance(plan, _Rows):
            raise StalePlanError("not planned here")
        if (batch.num_rows, batch.num_tokens) != (plan.num_rows, len(plan.own)):
            raise StalePlanError("other rows")
        if (q.shape[1], k.shape[1]) != (geometry.num_heads, geometry.num_kv_heads):
            raise StalePlanError("other heads")
        if layer_id not in self._pools:
            raise InternalError(f"layer {layer_id} is not here")
        pool = self._pools[layer_id]
        for token, (page, offset) in enumerate(plan.own):
            pool[page, 0, :, offset], pool[page, 1, :, offset] = k[token], v[token]
        out = torch.empty_like(q)
        for token, cells in enumerate(plan.seen):
            pages, offsets = torch.tensor(cells).unbind(1)
            keys, values = pool[pages, 0, :, offsets].double(), pool[pages, 1, :, offsets].double()
            for head in range(geometry.num_heads):
                kv_head = head // (geometry.num_heads // geometry.num_kv_heads)
                scores = keys[:, kv_head] @ q[token, head].double()
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1].double()])
                weights = torch.softmax(scores * geometry.scale, 0)[: len(cells)]
                out[token, head] = weights @ values[:, kv_head]
        return out

    @staticmethod
    def _sees(batch: ForwardBatch, row: int, token: int, key: int) -> bool:
        node = key - batch.context_lens[row]
        info = batch.spec_info
        if node < 0 or not isinstance(info, SpecInfo):
            return key <= batch.context_lens[row] + token
        return node in ancestors(info.rows[row].parents, token)
