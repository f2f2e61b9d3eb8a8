"""Recurrent layers on a CUDA device by Triton kernels, with the contract of the CPU backend."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.backends.recurrent_batch import check_mode, pool_of
from engine.backends.recurrent_tree import node_scratch
from engine.backends.tree_layout import first_state, kept_states
from engine.core.batch import ForwardBatch, ForwardMode, GraphBucket
from engine.core.draft_trees import SpecInfo
from engine.kernels.device.conv import conv_prefill
from engine.kernels.device.delta import Moves, conv_step, delta_step
from engine.kernels.device.delta_chunks import delta_chunks
from engine.kernels.device.prompts import PromptRows
from engine.kernels.device.tree import Trees, conv_tree, delta_tree
from engine.memory.layout import NULL_INDEX
from engine.memory.static import StaticInts, moved
from runtime.errors import InternalError


class DeviceRecurrent:
    """A `RecurrentBackend` over conv and state pools of one device, by layer id.

    Conv pools are [num_slots, kernel - 1, channels]; state pools are [num_slots, Hv, dk, dv] fp32.
    The backend also verifies and commits trees of up to `max_nodes` nodes per row. `num_scratch`
    records (including the null record) keep their states.
    """

    def __init__(
        self,
        *,
        conv_pools: Mapping[int, Tensor],
        state_pools: Mapping[int, Tensor],
        max_nodes: int = 0,
        num_scratch: int = 0,
    ) -> None:
        self._conv_pools, self._state_pools = dict(conv_pools), dict(state_pools)
        self._max_nodes = max_nodes
        self._num_scratch = num_scratch
        self._conv_scratch, self._state_scratch = (
            {
                layer_id: node_scratch(pool, num_scratch * max_nodes)
                for layer_id, pool in pools.items()
            }
            for pools in (conv_pools, state_pools)
        )
        self._prepared: tuple[ForwardBatch, Trees | PromptRows] | None = None
        self._static: StaticInts | None = None
        self._captured: dict[GraphBucket, Trees] = {}

    def reserve(self, buckets: Sequence[GraphBucket]) -> None:
        """Allocate the memory from which captured forwards read their slots and trees."""
        rows, tokens = (
            max(counts)
            for counts in zip(*((b.num_rows, b.num_tokens) for b in buckets), strict=True)
        )
        if self._has_layers:
            self._static = StaticInts(
                {
                    "slots": rows,
                    "fresh": rows,
                    "starts": rows + 1,
                    "rows": tokens,
                    "parents": tokens,
                    "targets": tokens,
                },
                self._device,
            )

    def prepare(self, batch: ForwardBatch) -> None:
        """Prepare the recurrent inputs of the batch.

        For a padded batch they are written to the memory that its captured forward reads.
        """
        if not self._has_layers:
            return
        if batch.graph_bucket is not None:
            self._captured[batch.graph_bucket] = self._rows_of(batch)
        elif batch.mode is ForwardMode.REPLAY:
            raise InternalError("recurrent layers on a device replay one token at a time")
        elif batch.mode is ForwardMode.PREFILL:
            check_mode(batch)
            self._prepared = (
                batch,
                PromptRows.of(
                    batch.slot_ids.tolist(),
                    batch.context_lens,
                    batch.query_lens,
                    lambda host: moved(host, self._device),
                ),
            )
        else:
            self._prepared = batch, self._rows_of(batch)

    def causal_conv(self, layer_id: int, x: Tensor, weight: Tensor, batch: ForwardBatch) -> Tensor:
        """Implement `RecurrentBackend.causal_conv`."""
        pool = pool_of(self._conv_pools, layer_id, "conv")
        rows = self._prepare(batch)
        x = x.contiguous()
        if isinstance(rows, PromptRows):
            return conv_prefill(x, weight, pool, rows)
        if batch.mode is ForwardMode.DECODE:
            return conv_step(x, weight, pool, pool, Moves(rows.slots, rows.slots, rows.fresh))
        return conv_tree(x, weight, pool, self._conv_scratch[layer_id], rows)

    def gated_delta_rule(
        self,
        layer_id: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        batch: ForwardBatch,
    ) -> Tensor:
        """Implement `RecurrentBackend.gated_delta_rule`."""
        pool = pool_of(self._state_pools, layer_id, "state")
        rows = self._prepare(batch)
        q, k, v, g, beta = (part.contiguous() for part in (q, k, v, g, beta))
        if isinstance(rows, PromptRows):
            return delta_chunks(q, k, v, g, beta, pool, rows)
        if batch.mode is ForwardMode.DECODE:
            return delta_step(
                q, k, v, g, beta, pool, pool, Moves(rows.slots, rows.slots, rows.fresh)
            )
        return delta_tree(q, k, v, g, beta, pool, self._state_scratch[layer_id], rows)

    def commit(self, batch: ForwardBatch) -> None:
        """Move the state of each row's last accepted node to its slot."""
        moves = kept_states(batch, self._max_nodes, self._num_scratch) if self._has_layers else []
        if not moves:
            return
        sources, slots = torch.tensor(moves).t().to(self._device)
        for pools, scratch in (
            (self._conv_pools, self._conv_scratch),
            (self._state_pools, self._state_scratch),
        ):
            for layer_id, pool in pools.items():
                pool[slots] = scratch[layer_id][sources]

    @property
    def _has_layers(self) -> bool:
        return bool(self._conv_pools or self._state_pools)

    @property
    def _device(self) -> torch.device:
        return next(iter([*self._conv_pools.values(), *self._state_pools.values()])).device

    def _prepare(self, batch: ForwardBatch) -> Trees | PromptRows:
        """Return the rows of the batch, which the first recurrent layer of a forward prepares.

        Captured forwards are prepared before they run.
        """
        if batch.graph_bucket is not None:
            return self._captured[batch.graph_bucket]
        if self._prepared is None or self._prepared[0] is not batch:
            self.prepare(batch)
        assert self._prepared is not None
        return self._prepared[1]

    def _rows_of(self, batch: ForwardBatch) -> Trees:
        """Return the rows of the batch; without trees only its slots and which rows are new."""
        values = {
            "slots": batch.slot_ids,
            "fresh": torch.tensor([context == 0 for context in batch.context_lens]),
        }
        if batch.mode is ForwardMode.VERIFY:
            values |= self._nodes_of(batch)
        else:
            check_mode(batch)
        if batch.graph_bucket is None:
            values = {name: moved(tensor.long(), self._device) for name, tensor in values.items()}
        else:
            if self._static is None:
                raise InternalError("no buckets were reserved")
            self._static.refill(values)
            values = {name: self._static[name][: len(tensor)] for name, tensor in values.items()}
        none = torch.empty(0, dtype=torch.int64, device=self._device)
        return Trees(
            **{
                name: values.get(name, none)
                for name in ("slots", "fresh", "starts", "rows", "parents", "targets")
            }
        )

    def _nodes_of(self, batch: ForwardBatch) -> dict[str, Tensor]:
        """Return the trees of the batch.

        A scratch record has `max_nodes` states, by node. Padding writes to the null record, with
        any number of nodes.
        """
        info = batch.spec_info
        if not self._max_nodes:
            raise InternalError("this pool has no memory for states of tree nodes")
        if not isinstance(info, SpecInfo):
            raise InternalError("a VERIFY batch needs its trees")
        starts = [0]
        rows = list[int]()
        parents = list[int]()
        targets = list[int]()
        for row, (spec, slot) in enumerate(zip(info.rows, batch.slot_ids.tolist(), strict=True)):
            count = len(spec.parents)
            first = starts[-1]
            is_padding = batch.graph_bucket is not None and slot == NULL_INDEX
            if count != batch.query_lens[row] or not (is_padding or 0 < count <= self._max_nodes):
                raise InternalError(
                    f"row {row} brings {batch.query_lens[row]} nodes and a tree of {count}; at most "
                    f"{self._max_nodes} are verified at once"
                )
            rows += [row] * count
            parents += [first + parent if parent >= 0 else -1 for parent in spec.parents]
            kept_at = first_state(spec, slot, self._max_nodes, self._num_scratch)
            targets += [kept_at + min(node, self._max_nodes - 1) for node in range(count)]
            starts.append(first + count)
        return {
            name: torch.tensor(values)
            for name, values in (
                ("starts", starts),
                ("rows", rows),
                ("parents", parents),
                ("targets", targets),
            )
        }
