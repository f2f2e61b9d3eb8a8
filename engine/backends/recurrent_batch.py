"""Common parts of recurrent backends: checks, inputs of compiled code, and state copies.

A prefix cache has states copied at points within a row, and copied into the slot of a row that
resumes from one of them. The chunked delta rule has the same bits for any cut on its grid. So a row
that saves a state runs in two parts, within one pass of the layer. The convolution needs no cut,
because its state is its last inputs.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from engine.contracts.recurrent import RecurrentBackend
from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.rows import longs
from engine.kernels.delta_rule import CHUNK
from engine.kernels.host.codegen.compiled import dense_tokens
from engine.kernels.host.recurrent.delta_rule import DeltaInputs
from engine.kernels.recurrent_rows import RecurrentRows
from runtime.errors import InternalError


def check_mode(batch: ForwardBatch) -> None:
    """Check that recurrent layers can run the mode and the rows.

    Raises:
        InternalError: they cannot.
    """
    if batch.mode is ForwardMode.DECODE:
        if any(length != 1 for length in batch.query_lens):
            raise InternalError(f"decode rows bring one token each, got {batch.query_lens}")
    elif batch.mode is ForwardMode.PREFILL:
        for row, (query_len, context_len) in enumerate(
            zip(batch.query_lens, batch.context_lens, strict=True)
        ):
            if query_len and context_len % CHUNK:
                raise InternalError(
                    f"prefill row {row} starts at {context_len}, not on a multiple of {CHUNK}"
                )
    elif batch.num_tokens and batch.mode is not ForwardMode.REPLAY:
        raise InternalError(f"recurrent layers cannot run a {batch.mode} batch")


def pool_of(pools: Mapping[int, Tensor], layer_id: int, kind: str) -> Tensor:
    """Return the pool of a layer.

    Raises:
        InternalError: this stage does not have the layer.
    """
    pool = pools.get(layer_id)
    if pool is None:
        raise InternalError(f"layer {layer_id} has no {kind} slots on this stage")
    return pool


def recurrent_rows(batch: ForwardBatch, num_slots: int) -> RecurrentRows:
    """Return the rows for compiled code.

    Raises:
        InternalError: a slot is outside the pools; compiled code would write there.
    """
    slots = batch.slot_ids.tolist()
    if slots and not 0 <= min(slots) <= max(slots) < num_slots:
        raise InternalError(f"the pools have {num_slots} slots, the batch names {slots}")
    return RecurrentRows(
        starts=longs([0, *accumulate(batch.query_lens)]),
        slots=longs(slots),
        is_new=longs([int(length == 0) for length in batch.context_lens]),
    )


class Taps:
    """Convolution weights [C, K] in the form of kernels, [K, C] fp32, converted once per layer."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, layer_id: int, weight: Tensor) -> Tensor:
        known = self._known.get(layer_id)
        if known is None or known[0] is not weight:
            known = self._known[layer_id] = (weight, weight.float().t().contiguous())
        return known[1]


def delta_inputs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> DeltaInputs:
    """Return the inputs in the form of kernels.

    Shapes are those of `RecurrentBackend.gated_delta_rule`.
    """
    return DeltaInputs(
        dense_tokens(q),
        dense_tokens(k),
        dense_tokens(v),
        g.float().contiguous(),
        beta.float().contiguous(),
    )


@dataclass(frozen=True)
class StateCopy:
    """A copy of the state of `slot_id` to `target`, before token `end` of the batch.

    `num_tokens` is the number of the row's tokens up to there.
    """

    end: int
    num_tokens: int
    slot_id: int
    target: int


class SnapshotRecurrent:
    """A `RecurrentBackend` that adds state operations (`ForwardBatch.states`) to another one."""

    def __init__(
        self,
        backend: RecurrentBackend,
        *,
        conv_pools: Mapping[int, Tensor],
        state_pools: Mapping[int, Tensor],
    ) -> None:
        """Wrap `backend`, which works on the same pools."""
        self._backend = backend
        self._conv_pools, self._state_pools = dict(conv_pools), dict(state_pools)
        self._planned: (
            tuple[ForwardBatch, list[StateCopy], list[tuple[slice, ForwardBatch]]] | None
        ) = None

    def commit(self, batch: ForwardBatch) -> None:
        """Copy kept states into the slots of rows that resume from them, before the batch runs."""
        resume_states(batch, (*self._conv_pools.values(), *self._state_pools.values()))

    def causal_conv(self, layer_id: int, x: Tensor, weight: Tensor, batch: ForwardBatch) -> Tensor:
        """Implement `RecurrentBackend.causal_conv`."""
        out = self._backend.causal_conv(layer_id, x, weight, batch)
        for copy in self._plan(batch)[0]:
            length = weight.shape[1] - 1
            pool = pool_of(self._conv_pools, layer_id, "conv")
            if copy.num_tokens < length:
                raise InternalError(
                    f"a snapshot {copy.num_tokens} tokens into a row, of a convolution over {length}"
                )
            pool[copy.target] = x[copy.end - length : copy.end]
        return out

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
        copies, parts = self._plan(batch)
        if not copies:
            return self._backend.gated_delta_rule(layer_id, q, k, v, g, beta, batch)
        outs = []
        due = iter(copies)
        for tokens, part in parts:
            outs.append(
                self._backend.gated_delta_rule(
                    layer_id, q[tokens], k[tokens], v[tokens], g[tokens], beta[tokens], part
                )
            )
            if (copy := next(due, None)) is not None:
                pool = pool_of(self._state_pools, layer_id, "state")
                pool[copy.target] = pool[copy.slot_id]
        return torch.cat(outs)

    def _plan(
        self, batch: ForwardBatch
    ) -> tuple[list[StateCopy], list[tuple[slice, ForwardBatch]]]:
        """Return the copies in token order, and the parts of the batch.

        Each copy ends a part; the last part is the rest. The first recurrent layer of a forward
        makes them, and all layers use them.
        """
        if self._planned is None or self._planned[0] is not batch:
            copies = list(state_copies(batch))
            self._planned = batch, copies, list(batch_parts(batch, [copy.end for copy in copies]))
        return self._planned[1:]


def resume_states(batch: ForwardBatch, pools: Iterable[Tensor]) -> None:
    """Copy the records of `pools` from which rows resume into the rows' slots."""
    moves = (
        [
            (row.resumed_slot, slot)
            for row, slot in zip(batch.states, batch.slot_ids.tolist(), strict=True)
            if row.resumed_slot
        ]
        if batch.states
        else []
    )
    for pool in pools if moves else ():
        sources, slots = torch.tensor(moves, device=pool.device).t()
        pool[slots] = pool[sources]


def state_copies(batch: ForwardBatch) -> Iterator[StateCopy]:
    """Yield the copies for the rows' snapshots, in the order of the batch's tokens.

    Raises:
        InternalError: a snapshot is outside its row.
    """
    first = 0
    for row, length, context_len, slot in (
        zip(
            batch.states, batch.query_lens, batch.context_lens, batch.slot_ids.tolist(), strict=True
        )
        if batch.states
        else ()
    ):
        for snapshot in row.snapshots:
            count = snapshot.num_tokens - context_len
            if not 0 < count <= length:
                raise InternalError(
                    f"a snapshot at {snapshot.num_tokens} of a row from {context_len} to "
                    f"{context_len + length}"
                )
            yield StateCopy(first + count, count, slot, snapshot.slot_id)
        first += length


def batch_parts(batch: ForwardBatch, cuts: list[int]) -> Iterator[tuple[slice, ForwardBatch]]:
    """Yield the tokens up to each cut, and those after the last one, as batches."""
    ends = [*cuts, batch.num_tokens] if cuts and cuts[-1] < batch.num_tokens else cuts
    for start, end in zip([0, *ends], ends, strict=False):
        rows = list[int]()
        lens = list[int]()
        contexts = list[int]()
        first = 0
        for row, length in enumerate(batch.query_lens):
            begin = max(first, start)
            stop = min(first + length, end)
            if begin < stop:
                rows.append(row)
                lens.append(stop - begin)
                contexts.append(batch.context_lens[row] + begin - first)
            first += length
        yield (
            slice(start, end),
            replace(
                batch.filter(rows),
                query_lens=tuple(lens),
                context_lens=tuple(contexts),
                token_ids=None,
                positions=batch.positions[start:end],
                states=(),
            ),
        )
