"""What every recurrent backend refuses."""

from collections.abc import Mapping

from torch import Tensor

from engine.core.batch import ForwardBatch, ForwardMode
from engine.kernels.delta_rule import CHUNK
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
