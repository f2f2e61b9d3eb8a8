"""Links over NCCL, for stages that each have their own device.

NCCL rejects two ends on one device.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroupNCCL

from engine.pipeline.c10d import PointToPoint, Store, Work
from engine.pipeline.links import OPEN_TIMEOUT_S, P2PLink, Transfer

_SPIN_S = 200e-6
_SLEEP_S = 50e-6
_ENVIRONMENT = {
    # NCCL's watchdog would end the process, but a stage must survive a lost neighbor.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # so would the watchdog's monitor
    "TORCH_NCCL_BLOCKING_WAIT": "0",  # the device waits, not the host
}
"""Environment of NCCL process groups, read when one is made. There is no other way to set it."""


class NcclBackend:
    """`LinkBackend` over NCCL."""

    name = "nccl"

    def __init__(self, device: torch.device) -> None:
        """Set the environment for NCCL. `device` includes its index."""
        self.device = device
        self.device_id = str(torch.cuda.get_device_properties(device).uuid)
        os.environ.update(_ENVIRONMENT)

    def open(self, store: Store, end: int) -> P2PLink:
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=OPEN_TIMEOUT_S)  # noqa: SLF001 - there is no public name
        with torch.cuda.device(self.device):
            link = NcclLink(
                cast(PointToPoint, ProcessGroupNCCL(store, end, 2, options)), self.device, end
            )
            link.greet()
        return link


class NcclLink:
    """`P2PLink` over NCCL.

    Messages run on a separate stream. Receiving waits for no earlier work; sending waits for all of
    it.
    """

    def __init__(self, group: PointToPoint, device: torch.device, end: int) -> None:
        self._group = group
        self._device = device
        self._peer = 1 - end
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def greet(self) -> None:
        """Exchange a first message, which creates the communicator.

        It blocks until both ends are there.
        """
        flat = torch.zeros(1, dtype=torch.uint8, device=self._device)
        transfer = self.send(flat) if self._peer == 1 else self.receive(1)[1]
        if not transfer.wait(OPEN_TIMEOUT_S):
            self.abort()
            raise RuntimeError(f"the first message took longer than {OPEN_TIMEOUT_S:g} s")

    def send(self, flat: Tensor) -> Transfer:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            return self._launch(self._group.send, flat)

    def receive(self, num_bytes: int) -> tuple[Tensor, Transfer]:
        user = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            flat = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            flat.record_stream(user)
            return flat, self._launch(self._group.recv, flat)

    def abort(self) -> None:
        self._group.abort()

    def _launch(
        self, operation: Callable[[list[Tensor], int, int], Work], flat: Tensor
    ) -> Transfer:
        operation([flat], self._peer, 0).wait()  # this stream waits, not the host
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(self._stream)
        return _NcclTransfer(flat, done)


@dataclass(frozen=True)
class _NcclTransfer:
    """A transfer that is done when the device has passed its event.

    A failed message is never passed: its kernel runs until the link is aborted.
    """

    flat: Tensor
    done: torch.cuda.Event

    def wait(self, timeout_s: float) -> bool:
        began = time.monotonic()
        while not self.done.query():  # type: ignore[no-untyped-call]
            waited_s = time.monotonic() - began
            if waited_s >= timeout_s:
                return False
            time.sleep(0 if waited_s < _SPIN_S else _SLEEP_S)
        return True
