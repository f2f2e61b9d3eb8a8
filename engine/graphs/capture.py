"""Capturing device work once and replaying it: what a runner needs of it, and CUDA graphs."""

from collections.abc import Callable
from typing import Protocol

import torch

from runtime.errors import ConfigError

_WARM_UPS = 2  # what is compiled, tuned or allocated on first use must be so before the capture


class Graph(Protocol):
    """Captured work. It reads and writes the memory it was captured with, and runs no Python."""

    def replay(self) -> None:
        """Start the work again, on the current stream."""
        ...


class Capture(Protocol):
    def capture(self, name: str, forward: Callable[[], None]) -> Graph:
        """Run `forward` until it has settled and once more to record what it starts on the device.

        Raises:
            ConfigError: it does what cannot be captured, or memory ran out; the message has `name`.
        """
        ...


class CudaCapture:
    """A `Capture` by CUDA graphs of one device. All share one memory pool: they are replayed one
    after the other, on one stream, and what outlives a replay lies outside of the pool."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, name: str, forward: Callable[[], None]) -> Graph:
        """See `Capture.capture`."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._stream.device)
        try:
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):
                    forward()
            current.wait_stream(self._stream)
            # Other threads of this process may use the device meanwhile.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                forward()
        except RuntimeError as error:
            raise ConfigError(
                f"the CUDA graph for {name} could not be captured ({error}); lower --max-running or "
                "start with --no-cuda-graphs",
                field="cuda_graphs",
            ) from error
        return graph
