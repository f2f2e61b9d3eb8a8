"""Rows of a prefill batch on the device, computed once and read by every recurrent layer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.kernels.delta_rule import CHUNK

# Triton compiles a kernel again for a pointer that is not aligned to 16 bytes.
_ALIGNMENT = 4


@dataclass(frozen=True)
class PromptRows:
    """The rows of a batch that have new tokens. All tensors are int32.

    Attributes:
        slots, fresh: [R], the record of each row, and 1 if its state is zero whatever it holds.
        starts, stops: [R], the first token of each row, and the end.
        token_slots, token_fresh, token_starts: [T], the same of each token's row.
        chunk_starts, chunk_sizes: [N], the first token and the number of tokens of each chunk of
            at most 64.
        row_chunks: [R + 1], the first chunk of each row, and the end.
    """

    slots: Tensor
    fresh: Tensor
    starts: Tensor
    stops: Tensor
    token_slots: Tensor
    token_fresh: Tensor
    token_starts: Tensor
    chunk_starts: Tensor
    chunk_sizes: Tensor
    row_chunks: Tensor

    @classmethod
    def of(
        cls,
        slot_ids: Sequence[int],
        context_lens: Sequence[int],
        query_lens: Sequence[int],
        move: Callable[[Tensor], Tensor],
    ) -> "PromptRows":
        """Return the rows of a batch; `move` copies a host tensor to the device, once."""
        lengths = np.array(query_lens, np.int32)
        chosen = np.flatnonzero(lengths)
        lengths = lengths[chosen]
        stops = lengths.cumsum(dtype=np.int32)
        starts = stops - lengths
        slots = np.array(slot_ids, np.int32)[chosen]
        fresh = (np.array(context_lens, np.int32)[chosen] == 0).astype(np.int32)
        num_chunks = -(-lengths // CHUNK)
        row_chunks = np.concatenate([[0], num_chunks.cumsum()])
        place = np.arange(row_chunks[-1]) - np.repeat(row_chunks[:-1], num_chunks)
        chunk_starts = np.repeat(starts, num_chunks) + place * CHUNK
        return cls(
            **_moved_together(
                {
                    "slots": slots,
                    "fresh": fresh,
                    "starts": starts,
                    "stops": stops,
                    "token_slots": np.repeat(slots, lengths),
                    "token_fresh": np.repeat(fresh, lengths),
                    "token_starts": np.repeat(starts, lengths),
                    "chunk_starts": chunk_starts,
                    "chunk_sizes": np.minimum(np.repeat(stops, num_chunks) - chunk_starts, CHUNK),
                    "row_chunks": row_chunks,
                },
                move,
            )
        )


def _moved_together(
    values: Mapping[str, np.ndarray], move: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Return the arrays as int32 tensors that share one piece of the device's memory."""
    padded = [-(-len(array) // _ALIGNMENT) * _ALIGNMENT for array in values.values()]
    places = np.concatenate([[0], np.cumsum(padded)]).tolist()
    host = np.zeros(places[-1], np.int32)
    for place, array in zip(places, values.values(), strict=False):
        host[place : place + len(array)] = array
    shared = move(torch.from_numpy(host))
    return {
        name: shared[place : place + len(array)]
        for place, (name, array) in zip(places, values.items(), strict=False)
    }
