"""Recurrent layers on the CPU: state slots, ragged batches and both forms of the delta rule.

Compiled code serves the dtypes that have kernels, plain torch the others.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from engine.backends.gated_delta import chunked, decays_of, normalize_heads, recurrent_step
from engine.backends.recurrent_batch import Taps, check_mode, delta_inputs, pool_of, recurrent_rows
from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.numerics import Numerics, silu
from engine.core.rows import longs
from engine.kernels.delta_rule import CHUNK
from engine.kernels.host.codegen.compiled import Team, dense_tokens, has_kernels
from engine.kernels.host.recurrent.causal_conv import causal_conv
from engine.kernels.host.recurrent.delta_rule import delta_chunks, delta_steps
from engine.kernels.recurrent_rows import RecurrentRows, StateSteps
from runtime.errors import InternalError


@dataclass(frozen=True)
class _RowLayout:
    """The places of ragged rows in padded form, for R rows and T tokens.

    Attributes:
        counts: the number of chunks per row.
        token_at: [T] int64, each token's place in [chunks * 64].
        window_at: [T] int64, each token's place among the rows' inputs, with kernel - 1 old inputs
            before each row.
        history_at: [R, kernel - 1] int64, the places of the old inputs.
        latest_at: [R, kernel - 1] int64, the places of the last inputs, which are the next conv
            state.
    """

    counts: tuple[int, ...]
    token_at: Tensor
    window_at: Tensor
    history_at: Tensor
    latest_at: Tensor


@dataclass(frozen=True)
class RecurrentPlan:
    """The states that a batch's tokens read and write.

    `steps` is set if the delta rule runs in the one-step form.
    """

    rows: RecurrentRows
    steps: StateSteps | None


class CpuRecurrent:
    """A `RecurrentBackend` over conv and state pools, by layer id.

    Conv pools are [num_slots, kernel - 1, channels]; state pools are [num_slots, Hv, dk, dv] fp32.
    PREFILL rows must start on the 64-token grid: only cuts on that grid keep the bits of the
    chunked form.
    """

    def __init__(
        self,
        *,
        conv_pools: Mapping[int, Tensor],
        state_pools: Mapping[int, Tensor],
        numerics: Numerics,
    ) -> None:
        for layer_id, pool in state_pools.items():
            if pool.dtype is not torch.float32:
                raise InternalError(
                    f"layer {layer_id}: recurrent state must be fp32, the pool is {pool.dtype}"
                )
        self._conv_pools = dict(conv_pools)
        self._state_pools = dict(state_pools)
        self._numerics = numerics
        self._team = Team()
        self._taps = Taps()
        self._planned: tuple[ForwardBatch, RecurrentPlan] | None = None

    def causal_conv(self, layer_id: int, x: Tensor, weight: Tensor, batch: ForwardBatch) -> Tensor:
        """Implement `RecurrentBackend.causal_conv`."""
        pool = pool_of(self._conv_pools, layer_id, "conv")
        plan = self.plan(batch)
        if not x.shape[0]:
            return x
        if x.dtype == pool.dtype and has_kernels(x.dtype):
            return causal_conv(
                dense_tokens(x), self._taps.of(layer_id, weight), pool, plan.rows, self._team
            )
        return _plain_conv(x, weight, pool, batch)

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
        """Implement `RecurrentBackend.gated_delta_rule`, including the normalization of q and k."""
        pool = pool_of(self._state_pools, layer_id, "state")
        plan = self.plan(batch)
        if not v.shape[0]:
            return v.float()
        if not has_kernels(v.dtype):
            return _plain_delta_rule(q, k, v, g, beta, pool, batch)
        inputs = delta_inputs(q, k, v, g, beta)
        if plan.steps is not None:
            return delta_steps(inputs, plan.rows, plan.steps, pool, pool, self._team)
        return delta_chunks(inputs, plan.rows, pool, self._team)

    def plan(self, batch: ForwardBatch) -> RecurrentPlan:
        """Implement `PlansStates.plan`.

        The plan is made before or at the first recurrent layer of a forward, and all layers use it.
        """
        if self._planned is None or self._planned[0] is not batch:
            pools = (*self._conv_pools.values(), *self._state_pools.values())
            if pools:
                check_mode(batch)
            rows = recurrent_rows(batch, min((len(pool) for pool in pools), default=sys.maxsize))
            steps = None
            if batch.mode is ForwardMode.DECODE:
                steps = StateSteps(parents=torch.full_like(rows.slots, -1), targets=rows.slots)
            elif batch.mode is ForwardMode.REPLAY:
                steps = _steps_in_slots(rows, batch.query_lens)
            self._planned = batch, RecurrentPlan(rows, steps)
        return self._planned[1]


def _steps_in_slots(rows: RecurrentRows, query_lens: Sequence[int]) -> StateSteps:
    """Return the steps of rows whose tokens leave their states, one after the other, in the slot."""
    parents = torch.arange(-1, sum(query_lens) - 1)
    parents[rows.starts[:-1]] = -1
    return StateSteps(parents, torch.repeat_interleave(rows.slots, longs(query_lens)))


def _plain_conv(x: Tensor, weight: Tensor, pool: Tensor, batch: ForwardBatch) -> Tensor:
    """Compute the convolution as an explicit fp32 sum of one product per tap.

    The bits of library convolutions depend on the length.
    """
    history = _load(pool, batch)
    kernel = weight.shape[1]
    taps = weight.float().t()
    if batch.mode is ForwardMode.DECODE:
        window = torch.cat([history, x[:, None]], 1)
        pool[batch.slot_ids.long()] = window[:, 1:]
        return _convolve(window.float().unbind(1), taps).to(x.dtype)
    layout = _row_layout(batch, kernel)
    inputs = x.new_empty(len(x) + layout.history_at.numel(), x.shape[1])
    inputs[layout.history_at.flatten()] = history.flatten(0, 1)
    inputs[layout.window_at] = x
    pool[batch.slot_ids.long()] = inputs[layout.latest_at]
    wide = inputs.float()
    length = len(inputs) - kernel + 1
    out = _convolve([wide[tap : tap + length] for tap in range(kernel)], taps)
    return out[layout.window_at - (kernel - 1)].to(x.dtype)


def _plain_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, batch: ForwardBatch
) -> Tensor:
    q, k = normalize_heads(q, k, v.shape[1])
    v = v.float()
    g = decays_of(g)
    state = _load(pool, batch)
    if batch.mode is ForwardMode.DECODE:
        out, state = recurrent_step(q, k, v, g, beta, state)
    elif batch.mode is ForwardMode.REPLAY:
        out = torch.empty_like(v)
        starts = [0, *accumulate(batch.query_lens)]
        for offset in range(max(batch.query_lens)):
            rows = [row for row, length in enumerate(batch.query_lens) if length > offset]
            at = [starts[row] + offset for row in rows]
            out[at], state[rows] = recurrent_step(q[at], k[at], v[at], g[at], beta[at], state[rows])
    else:
        layout = _row_layout(batch, 1)
        q, k, v, g, beta = (_to_chunks(part, layout) for part in (q, k, v, g, beta[..., None]))
        out, state = chunked(q, k, v, g, beta[..., 0], state, layout.counts)
        out = out.transpose(1, 2).flatten(0, 1)[layout.token_at]
    pool[batch.slot_ids.long()] = state
    return out


def _load(pool: Tensor, batch: ForwardBatch) -> Tensor:
    """Return the rows' states; a starting row has zeros, whatever its slot holds."""
    states = pool[batch.slot_ids.long()]
    starting = [row for row, context_len in enumerate(batch.context_lens) if context_len == 0]
    if starting:
        states[starting] = 0.0
    return states


def _convolve(windows: "tuple[Tensor, ...] | list[Tensor]", taps: Tensor) -> Tensor:
    total = windows[0] * taps[0]
    for window, tap in zip(windows[1:], taps[1:], strict=True):
        total = total + window * tap
    return silu(total)


def _row_layout(batch: ForwardBatch, kernel: int) -> _RowLayout:
    lengths = torch.tensor(batch.query_lens, dtype=torch.long)
    counts = tuple(-(-length // CHUNK) for length in batch.query_lens)
    rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    starts = torch.cumsum(lengths, 0) - lengths
    offsets = torch.arange(len(rows)) - starts[rows]
    chunk_starts = torch.tensor([sum(counts[:row]) for row in range(len(counts))], dtype=torch.long)
    history_starts = starts + torch.arange(len(lengths)) * (kernel - 1)
    steps = torch.arange(kernel - 1)
    return _RowLayout(
        counts=counts,
        token_at=chunk_starts[rows] * CHUNK + offsets,
        window_at=history_starts[rows] + kernel - 1 + offsets,
        history_at=history_starts[:, None] + steps,
        latest_at=(history_starts + lengths)[:, None] + steps,
    )


def _to_chunks(x: Tensor, layout: _RowLayout) -> Tensor:
    """Convert [T, H, d] to contiguous [chunks, H, 64, d], padding a row's last chunk with zeros."""
    padded = x.new_zeros(sum(layout.counts) * CHUNK, *x.shape[1:])
    padded[layout.token_at] = x
    return padded.view(-1, CHUNK, *x.shape[1:]).transpose(1, 2).contiguous()
