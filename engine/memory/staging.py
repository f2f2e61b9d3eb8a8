"""Pinned host buffers between a device's pools and a transport of host bytes.

Records with consecutive indices are adjacent in a pool, so each copy is one stretch of device
memory. A copy engine performs it without a gather kernel, and the multiprocessors continue to
compute.
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
    """A position in a queue of copies."""

    def query(self) -> bool:
        """Return whether all earlier copies are complete. Never blocks."""
        ...


class CopyQueue(Protocol):
    """A queue of copies that run in order, concurrently with computation."""

    def enter_thread(self) -> None:
        """Prepare this thread, the only one that starts copies.

        Raises:
            ConfigError: the device cannot be used.
        """
        ...

    def settle(self) -> None:
        """Wait until all is computed that the device was given before."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> CopyEvent:
        """Start a copy of [n] uint8 bytes; one side is pinned, the other on the device."""
        ...


class CudaCopies:
    """A copy queue on a stream of a CUDA device.

    The caller orders it with other streams: a source must be final and a target unused when the
    copy starts. The transfer plane ensures this by events and leases.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def enter_thread(self) -> None:
        """Make the device current in this thread, and use it once.

        A thread without a context of the device crashes in the first driver call that needs one,
        possibly hours later and inside UCX.

        Raises:
            ConfigError: the device cannot be used.
        """
        if (self._device.index or 0) >= (count := torch.cuda.device_count()):
            raise ConfigError(
                f"device {self._device} cannot be used for handoffs: torch finds {count} CUDA devices",
                field="device",
            )
        try:
            use_in_this_thread(self._device)
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            # Entering a stream for every copy takes longer than starting the copy.
            torch.cuda.set_stream(self._stream)
            torch.zeros(1, device=self._device)
            # The pools are cleared on a stream that this one does not wait for.
            torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            raise ConfigError(
                f"device {self._device} cannot be used for handoffs: {error}", field="device"
            ) from error

    def settle(self) -> None:
        torch.cuda.default_stream(self._device).synchronize()

    def copy(self, target: Tensor, source: Tensor) -> CopyEvent:
        target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event


class PinnedStaging:
    """A bounded number of buffers of equal size, each lent to one message at a time.

    The class implements `transfer.transport.device.Staging`. The borrowing thread must call
    `enter_thread` first.
    """

    def __init__(
        self, copies: CopyQueue, *, num_buffers: int, buffer_bytes: int, pinned: bool = True
    ) -> None:
        """Allocate the buffers in pinned memory.

        Raises:
            ConfigError: there are fewer than two buffers, or the memory cannot be pinned.
        """
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
        self._contents = [memoryview(row) for row in self._memory.numpy()]
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
        """Prepare this thread to start copies.

        Raises:
            ConfigError: the device cannot be used.
        """
        self._copies.enter_thread()
        self._thread = threading.get_ident()

    def check_thread(self) -> None:
        """Check that this is the thread that called `enter_thread`.

        Raises:
            InternalError: this is another thread.
        """
        if self._thread != threading.get_ident():
            raise InternalError(
                "the thread that moves bytes has no context of the device: give `enter_thread` of its "
                "staging to the transfer agent as `on_thread_start`"
            )

    def borrow(self, num_bytes: int) -> "StagingLoan | None":
        """Lend the first `num_bytes` of a buffer; return None while all buffers are lent.

        Raises:
            InternalError: `num_bytes` exceeds the size of a buffer.
        """
        if num_bytes > self._memory.shape[1]:
            raise InternalError(
                f"a message of {num_bytes} bytes for staging buffers of {self._memory.shape[1]}"
            )
        if not self._free:
            return None
        index = self._free.pop()
        memory = self._memory[index, :num_bytes]
        return StagingLoan(self, self._copies, index, memory, self._contents[index][:num_bytes])

    def give_back(self, index: int) -> None:
        """Return a buffer; called by its loan."""
        self._free.append(index)


class StagingLoan:
    """One buffer until `release`; implements `transfer.transport.device.Loan`."""

    def __init__(
        self,
        staging: PinnedStaging,
        copies: CopyQueue,
        index: int,
        memory: Tensor,
        content: memoryview,
    ) -> None:
        self._staging = staging
        self._copies = copies
        self._index = index
        self._memory = memory
        self._event: CopyEvent | None = None
        self._is_released = False
        self.content = content

    def fetch(self, source: Buffer) -> None:
        self._event = self._copies.copy(self._memory, _tensor(source))

    def store(self, target: Buffer) -> None:
        self._event = self._copies.copy(_tensor(target), self._memory)

    def is_settled(self) -> bool:
        return self._event is None or self._event.query()

    def release(self) -> None:
        """Return the buffer. Idempotent.

        Raises:
            InternalError: a copy is running; the next message would be mixed with it.
        """
        if not self.is_settled():
            raise InternalError("a staging buffer is given back while it is being copied")
        if not self._is_released:
            self._is_released = True
            self._staging.give_back(self._index)


class DevicePools:
    """Pools as tensors of bytes, for a transport of device memory.

    The class implements `transfer.agent.stage_transfer.PoolMemory`.
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
        """Return the bytes of records on the device, as `StagePools.records` does."""
        return self._pools.records(layer_id, kind, first_index, count, part)


def _tensor(buffer: Buffer) -> Tensor:
    if not isinstance(buffer, Tensor):
        raise InternalError(f"{type(buffer).__name__} is not device memory")
    return buffer
