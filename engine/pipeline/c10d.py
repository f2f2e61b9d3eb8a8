"""What of torch.distributed's process groups is used here, typed where its stubs are silent. Each
object is made by its own constructor: `torch.distributed.init_process_group` would make one for the
whole process.
"""

from datetime import timedelta
from typing import Protocol, cast

from torch import Tensor
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

__all__ = ["PointToPoint", "PrefixStore", "Store", "TCPStore", "Work", "gloo_group"]


class Work(Protocol):
    """An operation under way."""

    def wait(self, timeout: timedelta = ...) -> bool: ...


class PointToPoint(Protocol):
    """A process group. Its operations start in the order of the calls; a tag must be given."""

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
    """Listens at `host`. Blocks until all are there; raises RuntimeError when they are not in
    time."""
    factory = cast(_GlooFactory, ProcessGroupGloo)
    options = factory._Options()  # noqa: SLF001 - it has no other name
    options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001
    options._devices = [factory.create_device(hostname=host)]  # noqa: SLF001
    return factory(store, rank, size, options)
