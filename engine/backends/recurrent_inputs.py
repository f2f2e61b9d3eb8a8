"""What compiled code for the host is given of recurrent layers' batches and inputs."""

from itertools import accumulate

import torch
from torch import Tensor

from engine.core.batch import ForwardBatch
from engine.kernels.host.compiled import dense_tokens
from engine.kernels.host.delta_rule import DeltaInputs
from engine.kernels.recurrent_rows import RecurrentRows
from runtime.errors import InternalError


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
