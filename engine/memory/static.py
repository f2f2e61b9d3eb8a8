"""Fixed memory that captured work reads; its content is replaced before each replay."""

from collections.abc import Mapping

import torch
from torch import Tensor


class Fence:
    """A wait of the host for the device work that was queued before `set`.

    If the device is the host, there is nothing to wait for.
    """

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

    The copy does not wait for the device. The next `refill` waits until this copy is complete,
    which is before the work that uses it begins.
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
        """Return the vector on the device, always the same memory."""
        return self._device[self._places[name]]

    def refill(self, values: Mapping[str, Tensor]) -> None:
        """Replace the first entries of each vector by host integers or booleans; clear the rest."""
        self._copied.wait()
        self._host.zero_()
        for name, tensor in values.items():
            place = self._host[self._places[name]]
            place[: len(tensor)] = tensor
        self._device.copy_(self._host, non_blocking=True)
        self._copied.set()


def moved(values: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device without blocking the host."""
    host = values.pin_memory() if device.type == "cuda" else values
    return host.to(device, non_blocking=True)
