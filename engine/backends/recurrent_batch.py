"""What recurrent backends take of a batch: the modes and rows that all of them refuse, and what compiled code for the
host is given."""

from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor

from engine.core.batch import ForwardBatch, ForwardMode
from engine.kernels.delta_rule import CHUNK
from engine.kernels.host.compiled import dense_tokens
from engine.kernels.host.delta_rule import DeltaInputs
from engine.kernels.recurrent_rows import RecurrentRows
from runtime.errors import InternalError


def check_mode(batch: ForwardBatch) -> None:
    """Raises InternalError for a mode, or rows, that recurrent layers cannot run."""
    if batch.mode is ForwardMode.DECODE:
        if any(length != 1 for length in batch.query_lens):
            raise InternalError(f"decode rows bring one token each, got {batch.query_lens}")
    elif batch.mode is ForwardMode.PREFILL:
        for row, (query_len, context_len) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
            if query_len and context_len % CHUNK:
                raise InternalError(f"prefill row {row} starts at {context_len}, not on a multiple of {CHUNK}")
    elif batch.num_tokens:
        raise InternalError(f"recurrent layers cannot run a {batch.mode} batch")


def pool_of(pools: Mapping[int, Tensor], layer_id: int, kind: str) -> Tensor:
    """Raises InternalError for a layer that this stage does not have."""
    pool = pools.get(layer_id)
    if pool is None:
        raise InternalError(f"layer {layer_id} has no {kind} slots on this stage")
    return pool


def recurrent_rows(batch: ForwardBatch, num_slots: int) -> RecurrentRows:
    """Raises InternalError for a slot that the pools have not: compiled code would write there."""
    slots = batch.slot_ids.long()
    if batch.num_rows and not 0 <= slots.min() <= slots.max() < num_slots:
        raise InternalError(f"the pools have {num_slots} slots, the batch names {slots.tolist()}")
    return RecurrentRows(starts=torch.tensor([0, *accumulate(batch.query_lens)]), slots=slots,
                         is_new=torch.tensor([int(length == 0) for length in batch.context_lens]))


def delta_inputs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> DeltaInputs:
    """As kernels read them. Shapes as in `RecurrentBackend.gated_delta_rule`."""
    return DeltaInputs(dense_tokens(q), dense_tokens(k), dense_tokens(v), g.float().contiguous(),
                       beta.float().contiguous())
