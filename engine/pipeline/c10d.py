"""Types for the process groups of torch.distributed that its stubs lack.

Each object is made by its own constructor, because `torch.distributed.init_process_group` would
create one for the whole process.
"""

from datetime import timedelta
from typing import Protocol, cast

from torch import Tensor
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

__all__ = ["PointToPoint", "PrefixStore", "Store", "TCPStore", "Work", "gloo_group"]


class Work(Protocol):
    """A running operation."""

    def wait(self, timeout: timedelta = ...) -> bool: ...


class PointToPoint(Protocol):
    """A process group. Operations start in the order of the calls, and each needs a tag."""

    def send(self, tensors: list[Tensor], dst_rank: int, tag: int) -> Work: ...

    def recv(self, tensors: list[Tensor], src_rank: int, tag: int) -> Work: ...

    def abort(self) -> None: ...


class _GlooOptions(Protocol):
    _timeout: timedelta
    _devices: list[object]


class _GlooFactory(Protocol):
    def _Options(self) -> _GlooOptions: ...

    def create_device(self, *, hostname: str) -> object: ...

    def __call__(
        self, store: Store, rank: int, size: int, options: _GlooOptions
    ) -> PointToPoint: ...


def gloo_group(store: Store, rank: int, size: int, *, host: str, timeout_s: float) -> PointToPoint:
    """Create a Gloo group that listens at `host`, and block until all members have joined.

    Raises:
        RuntimeError: not all members joined in time.
    """
    factory = cast(_GlooFactory, ProcessGroupGloo)
    options = factory._Options()  # noqa: SLF001 - there is no public name
    options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001
    options._devices = [factory.create_device(hostname=host)]  # noqa: SLF001
    return factory(store, rank, size, options)
