"""Memory that captured work reads: it keeps its place, and its content is replaced before each
replay."""

from collections.abc import Mapping

import torch
from torch import Tensor


class Fence:
    """The host waits for the work that the device was given before `set`. Nothing to wait for where
    the device is the host."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def set(self) -> None:
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class StaticInts:
    """Named int64 vectors on a device, refilled together by one copy from page-locked memory.

    The copy does not wait for the device; the next `refill` waits until this one's copy is done,
    which is before the work that it was made for has begun.
    """

    def __init__(self, sizes: Mapping[str, int], device: torch.device) -> None:
        count = sum(sizes.values())
        self._host = torch.zeros(count, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._device = torch.zeros(count, dtype=torch.int64, device=device)
        self._copied = Fence(device)
        self._places: dict[str, slice] = {}
        start = 0
        for name, size in sizes.items():
            self._places[name] = slice(start, start + size)
            start += size

    def __getitem__(self, name: str) -> Tensor:
        """The vector on the device, always the same memory."""
        return self._device[self._places[name]]

    def refill(self, values: Mapping[str, Tensor]) -> None:
        """Replace the first entries of each named vector by integers or booleans on the host; the
        others are zero."""
        self._copied.wait()
        self._host.zero_()
        for name, tensor in values.items():
            place = self._host[self._places[name]]
            place[: len(tensor)] = tensor
        self._device.copy_(self._host, non_blocking=True)
        self._copied.set()


def moved(values: Tensor, device: torch.device) -> Tensor:
    """A host tensor's copy on the device, for which the host does not wait."""
    host = values.pin_memory() if device.type == "cuda" else values
    return host.to(device, non_blocking=True)
