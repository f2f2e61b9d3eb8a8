"""Rows of a prefill batch in the format of the device's recurrent kernels."""

import torch

from engine.kernels.device.prompts import PromptRows


def test_rows_tokens_and_chunks() -> None:
    """Rows of 70 tokens after 64, of none, and of 3 from the start."""
    rows = PromptRows.of([5, 6, 7], [64, 0, 0], [70, 0, 3], torch.clone)
    assert rows.slots.tolist() == [5, 7]
    assert rows.fresh.tolist() == [0, 1]
    assert rows.starts.tolist() == [0, 70]
    assert rows.stops.tolist() == [70, 73]
    assert rows.token_slots.tolist() == [5] * 70 + [7] * 3
    assert rows.token_fresh.tolist() == [0] * 70 + [1] * 3
    assert rows.token_starts.tolist() == [0] * 70 + [70] * 3
    assert rows.chunk_starts.tolist() == [0, 64, 70]
    assert rows.chunk_sizes.tolist() == [64, 6, 3]
    assert rows.row_chunks.tolist() == [0, 2, 3]


def test_tensors_are_aligned_as_in_memory_of_their_own() -> None:
    """Otherwise Triton compiles the kernels again for each combination of lengths."""
    rows = PromptRows.of([1, 2, 3], [0, 0, 0], [1, 65, 2], torch.clone)
    base = rows.slots.data_ptr()
    for name, tensor in vars(rows).items():
        assert tensor.dtype is torch.int32, name
        assert (tensor.data_ptr() - base) % 16 == 0, name


def test_a_batch_without_new_tokens() -> None:
    rows = PromptRows.of([4], [64], [0], torch.clone)
    assert [len(tensor) for tensor in vars(rows).values()] == [0] * 9 + [1]
