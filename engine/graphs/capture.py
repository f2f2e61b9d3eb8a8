"""Capture and replay of device work: the protocol for a runner, and CUDA graphs."""

from collections.abc import Callable
from typing import Protocol

import torch

from runtime.errors import ConfigError

# Compilation, tuning and allocation on first use must happen before the capture.
_WARM_UPS = 2


class Graph(Protocol):
    """A captured sequence of device work.

    It reads and writes the memory that it was captured with, and runs no Python.
    """

    def replay(self) -> None:
        """Start the work again on the current stream."""
        ...


class Capture(Protocol):
    def capture(self, name: str, forward: Callable[[], None]) -> Graph:
        """Run `forward` to warm it up, then once more to record its device work.

        Raises:
            ConfigError: the forward cannot be captured, or memory ran out. The message contains
                `name`. The process should end: torch's allocator and generators may still be
                capturing.
        """
        ...


class CudaCapture:
    """A `Capture` that uses CUDA graphs of one device.

    All graphs share one memory pool, because they are replayed one after another on one stream.
    Memory that must outlive a replay is outside the pool.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, name: str, forward: Callable[[], None]) -> Graph:
        """Implement `Capture.capture`."""
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._stream.device)
        try:
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):
                    forward()
            current.wait_stream(self._stream)
            # Other threads of this process may use the device at the same time.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                forward()
        except RuntimeError as error:
            raise ConfigError(
                f"the CUDA graph for {name} could not be captured ({_cause(error)}); "
                "lower --max-running or start with --no-cuda-graphs",
                field="cuda_graphs",
            ) from error
        return graph


def _cause(error: BaseException) -> str:
    """Return the first line of the error that came first.

    Ending a capture that has failed raises again, with less to say than the failure itself.
    """
    while error.__context__ is not None:
        error = error.__context__
    return str(error).partition("\n")[0]
