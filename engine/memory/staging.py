"""Pinned host buffers between a device's pools and whatever moves host bytes.

Records with consecutive indices are adjacent in a pool, so what moves at a time is one stretch of
the device's memory: a copy engine takes it, no kernel gathers it, and the multiprocessors go on
computing.
"""

import threading
from typing import Protocol

import torch
from torch import Tensor

from engine.core.numerics import use_in_this_thread
from engine.memory.layout import Buffer, CacheKind, PoolGeometry
from engine.memory.pools import StagePools
from runtime.errors import ConfigError, InternalError


class CopyEvent(Protocol):
    """A place in a queue of copies."""

    def query(self) -> bool:
        """Whether everything before it is over. Never waits."""
        ...


class CopyQueue(Protocol):
    """Copies that run beside what computes, in the order in which they were started."""

    def enter_thread(self) -> None:
        """Prepare this thread, the only one that starts copies. Raises ConfigError when it
        cannot."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> CopyEvent:
        """Start a copy of bytes [n] uint8, one side pinned, the other on the device."""
        ...


class CudaCopies:
    """A stream of a CUDA device. Its order to other streams is left to the caller: a source must be
    final and a target unused when the copy starts, which the transfer plane knows from events and
    leases."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def enter_thread(self) -> None:
        """A thread without a context of the device crashes in the first driver call that needs one,
        maybe hours later and inside UCX. So it is made current here, and used."""
        if (self._device.index or 0) >= (count := torch.cuda.device_count()):
            raise ConfigError(
                f"device {self._device} cannot be used for handoffs: torch finds {count} CUDA devices",
                field="device",
            )
        try:
            use_in_this_thread(self._device)
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self._stream):
                torch.zeros(1, device=self._device)
            torch.cuda.synchronize(
                self._device
            )  # the pools are cleared on a stream that this one does not wait for
        except RuntimeError as error:
            raise ConfigError(
                f"device {self._device} cannot be used for handoffs: {error}", field="device"
            ) from error

    def copy(self, target: Tensor, source: Tensor) -> CopyEvent:
        assert self._stream is not None
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event


class PinnedStaging:
    """A bounded number of equal buffers, each lent to one message at a time.

    Satisfies `transfer.transport.device.Staging`. `enter_thread` must be the first call of the
    thread that borrows.
    """

    def __init__(
        self, copies: CopyQueue, *, num_buffers: int, buffer_bytes: int, pinned: bool = True
    ) -> None:
        """Raises ConfigError for fewer than two buffers, or when so much memory cannot be
        pinned."""
        if num_buffers < 2:
            raise ConfigError(
                f"staging needs at least 2 buffers, got {num_buffers}", field="device"
            )
        try:
            self._memory = torch.empty(
                num_buffers, buffer_bytes, dtype=torch.uint8, pin_memory=pinned
            )
        except RuntimeError as error:
            raise ConfigError(
                f"cannot pin {num_buffers} host buffers of {buffer_bytes} bytes: {error}",
                field="device",
            ) from error
        self._copies = copies
        self._free = list(range(num_buffers))
        self._thread: int | None = None

    @property
    def num_buffers(self) -> int:
        return len(self._memory)

    @property
    def num_lent(self) -> int:
        return len(self._memory) - len(self._free)

    def enter_thread(self) -> None:
        """Prepare this thread to start copies. Raises ConfigError when the device cannot be
        used."""
        self._copies.enter_thread()
        self._thread = threading.get_ident()

    def check_thread(self) -> None:
        """Raises InternalError in any thread but the one that has entered."""
        if self._thread != threading.get_ident():
            raise InternalError(
                "the thread that moves bytes has no context of the device: give `enter_thread` of its "
                "staging to the transfer agent as `on_thread_start`"
            )

    def borrow(self, num_bytes: int) -> "StagingLoan | None":
        """A buffer's first `num_bytes`; None while all are lent. Raises InternalError for more than
        a buffer holds."""
        if num_bytes > self._memory.shape[1]:
            raise InternalError(
                f"a message of {num_bytes} bytes for staging buffers of {self._memory.shape[1]}"
            )
        if not self._free:
            return None
        index = self._free.pop()
        return StagingLoan(self, self._copies, index, self._memory[index, :num_bytes])

    def give_back(self, index: int) -> None:
        """For loans."""
        self._free.append(index)


class StagingLoan:
    """One buffer, until `release`. Satisfies `transfer.transport.device.Loan`."""

    def __init__(
        self, staging: PinnedStaging, copies: CopyQueue, index: int, memory: Tensor
    ) -> None:
        self._staging = staging
        self._copies = copies
        self._index = index
        self._memory = memory
        self._event: CopyEvent | None = None
        self._is_released = False
        self.content: memoryview = memory.numpy().data

    def fetch(self, source: Buffer) -> None:
        self._event = self._copies.copy(self._memory, _tensor(source))

    def store(self, target: Buffer) -> None:
        self._event = self._copies.copy(_tensor(target), self._memory)

    def is_settled(self) -> bool:
        return self._event is None or self._event.query()

    def release(self) -> None:
        """Idempotent. Raises InternalError while a copy runs: the next message would be mixed with
        it."""
        if not self.is_settled():
            raise InternalError("a staging buffer is given back while it is being copied")
        if not self._is_released:
            self._is_released = True
            self._staging.give_back(self._index)


class DevicePools:
    """Pools as a transport for device memory takes them: as tensors of bytes.

    Satisfies `transfer.agent.stage_transfer.PoolMemory`.
    """

    def __init__(self, pools: StagePools) -> None:
        self._pools = pools

    @property
    def geometry(self) -> PoolGeometry:
        return self._pools.geometry

    def view(
        self,
        layer_id: int,
        kind: CacheKind,
        first_index: int,
        count: int,
        part: slice | None = None,
    ) -> Tensor:
        """See `StagePools.records`."""
        return self._pools.records(layer_id, kind, first_index, count, part)


def _tensor(buffer: Buffer) -> Tensor:
    if not isinstance(buffer, Tensor):
        raise InternalError(f"{type(buffer).__name__} is no memory of a device")
    return buffer
