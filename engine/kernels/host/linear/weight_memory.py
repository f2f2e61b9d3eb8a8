"""Memory of packed weights in huge pages, which many matrices are too small to fill."""

import math
import mmap
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.core.huge_pages import map_memory

Allocate = Callable[..., Tensor]  # (shape, *, dtype) -> a tensor with any contents

_BLOCK_BYTES = 256 << 20  # the huge page at its end may be mostly empty
_LINE_BYTES = 64  # of a processor's cache


class WeightMemory:
    """Memory for tensors that live about equally long: they are parts of large blocks.

    A block is released with the last of its tensors.
    """

    def __init__(self) -> None:
        self._block: mmap.mmap | None = None
        self._num_used = 0

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor with any contents, which begins at a cache line.

        Raises:
            OSError: memory is exhausted.
        """
        count = math.prod(shape)
        if not count:
            return torch.empty(*shape, dtype=dtype)
        num_bytes = -(-count * dtype.itemsize // _LINE_BYTES) * _LINE_BYTES
        if self._block is None or self._num_used + num_bytes > len(self._block):
            self._block, self._num_used = map_memory(max(num_bytes, _BLOCK_BYTES)), 0
        start = self._num_used
        self._num_used += num_bytes
        return torch.frombuffer(self._block, dtype=dtype, count=count, offset=start).view(*shape)
