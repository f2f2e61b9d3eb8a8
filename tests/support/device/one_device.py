"""A device that computes nothing, to see that nothing mixes devices: torch's `meta`, watched as
CUDA would.

Reading a meta tensor's values fails, so host code that would wait for the device shows as well.
Kernels cannot run there; stand-ins look at what they are given.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.backends.cuda.wrappers import GraphSizes

DEVICE = torch.device("meta")
_COPIES = ("aten::_to_copy", "aten::copy_")
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


class OneDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """CUDA's rule: an operation's tensors are on one device. Copies cross, host scalars go
    anywhere, and indices may be on the host. Only the number of tokens of each expert is read back:
    all went to the first."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_on_device = 0

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        name, given = func.name().split(".")[0], (*args, *(kwargs or {}).values())
        if name in _INDEXING:
            given = (given[0], *given[2:])
        devices = {
            leaf.device.type
            for leaf in tree_leaves(given)
            if isinstance(leaf, Tensor) and leaf.dim()
        }
        if name not in _COPIES:
            assert len(devices) < 2, f"{name} mixes {sorted(devices)}"
        self.num_on_device += DEVICE.type in devices
        if name == "aten::bincount":
            return torch.tensor([len(args[0]), *[0] * (args[2] - 1)])
        return func(*args, **(kwargs or {}))


@dataclass
class KernelStandIn:
    """In the place of a Triton kernel: every tensor it is launched with must be on the device."""

    num_launches: int = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: object, **constants: int) -> None:
            assert {arg.device for arg in args if isinstance(arg, Tensor)} == {DEVICE}
            self.num_launches += 1

        return launch


class _Wrapper:
    """In the place of FlashInfer's: lengths on the host, everything else on the device."""

    def plan(self, *args: object, custom_mask: Tensor | None = None, **options: object) -> None:
        places = [arg.device.type for arg in args if isinstance(arg, Tensor)]
        assert sorted(places) == ["cpu"] * (len(places) - 1) + [DEVICE.type]
        assert custom_mask is None or custom_mask.device == DEVICE

    def run(self, q: Tensor, paged_kv_cache: Tensor) -> Tensor:
        assert q.device == paged_kv_cache.device == DEVICE
        return torch.empty_like(q)


class WrapperStandIns:
    """A `WrapperFactory`."""

    def ragged(self, graph: GraphSizes | None = None) -> _Wrapper:
        return _Wrapper()

    def decode(self, *, group_size: int, graph: GraphSizes | None = None) -> _Wrapper:
        return _Wrapper()
