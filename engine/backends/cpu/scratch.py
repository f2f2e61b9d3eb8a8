"""Memory that is used again for every layer. Fresh memory costs page faults, several times a copy's own time."""

import math

import torch
from torch import Tensor


class Scratch:
    """Named buffers of one thread. A tensor is valid until the next `take` of its name."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor with arbitrary content. The buffer behind it grows and is kept."""
        count = math.prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < count:
            buffer = self._buffers[name, dtype] = torch.empty(count, dtype=dtype)
        return buffer[:count].view(shape)
