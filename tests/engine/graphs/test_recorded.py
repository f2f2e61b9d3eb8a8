"""Replay of a recorded function with other values; and functions that cannot be recorded."""

import ctypes
from array import array
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.graphs.recorded import Arena, CannotRecordError, record
from engine.kernels.host.codegen.compiled import Team
from engine.kernels.host.codegen.program import Launch, Program
from engine.kernels.host.linear.packed_linear import PackedWeight
from engine.kernels.host.tokens.norm_rope import rms_norm
from engine.kernels.host.tokens.row_ops import add_rows
from runtime.errors import InternalError


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(params=[1, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def replayed(function: Callable[[Tensor], Tensor], first: Tensor, second: Tensor) -> Tensor:
    """Return the result for `second` of a recording made with `first`."""
    x, results = first.clone(), list[Tensor]()
    recording = record(lambda: results.append(function(x)), Arena())
    assert torch.equal(results[0], function(first))
    x.copy_(second)
    recording.replay()
    return results[0]


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_launches_and_operations_are_done_again_in_their_order(dtype: torch.dtype) -> None:
    weight, order = torch.randn(64).to(dtype), torch.tensor([4, 1, 0, 2, 3])

    def function(x: Tensor) -> Tensor:
        heads = x.view(5, 4, 64)[:, 1:3].contiguous()
        normed = rms_norm(heads, weight, 1e-6, Team(), rounds_first=True)
        total = normed + heads
        total.mul_(2).add_(x[:, None, :64])
        return torch.cat([total[order], total.cos()], -1)

    first, second = torch.randn(5, 256).to(dtype), torch.randn(5, 256).to(dtype)
    assert torch.equal(replayed(function, first, second), function(second))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * x.max().item(),
        lambda x: x[x > 0],
        lambda x: x + torch.tensor([1.0]),
        lambda x: x * torch.rand(3),
        lambda x: x[torch.nonzero(x)],
        lambda x: x if bool(x.any()) else -x,
        lambda x: x * len(x.tolist()),
        lambda x: x * x.numpy().max(),
        lambda x: x * np.asarray(x).max(),
    ],
)
def test_operations_that_depend_on_values_are_refused(function: Callable[[Tensor], Tensor]) -> None:
    results = list[Tensor]()
    with pytest.raises(CannotRecordError, match=r"^aten|^tolist|^numpy|^__array__"):
        record(lambda: results.append(function(torch.ones(3))), Arena())
    assert len(results) == 1, "it ends all the same"
    if not any(name in function.__code__.co_names for name in ("rand",)):
        assert torch.equal(results[0], function(torch.ones(3)))


def test_memory_is_used_again_within_a_recording_and_by_the_next() -> None:
    arena, x = Arena(), torch.randn(1 << 20)

    def function() -> None:
        y = add_rows(x, x, Team())
        for _ in range(20):
            y = add_rows(y, x, Team())

    record(function, arena)
    assert 2 * x.nbytes <= arena.num_bytes <= 3 * x.nbytes
    before = arena.num_bytes
    record(function, arena)
    assert arena.num_bytes == before


def test_views_keep_their_memory_alive() -> None:
    arena, x = Arena(), torch.arange(64.0)

    def function() -> list[Tensor]:
        view = add_rows(x, x, Team()).view(8, 8)[3]
        return [view, *(add_rows(x, x[:1].expand(64).contiguous(), Team()) for _ in range(3))]

    results = list[list[Tensor]]()
    record(lambda: results.append(function()), arena)
    assert results[0][0].tolist() == [2.0 * place for place in range(24, 32)]


def test_a_kernel_that_does_not_end_is_named() -> None:
    does_nothing = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
    address = ctypes.cast(does_nothing, ctypes.c_void_p).value
    assert address is not None
    launches = [
        Launch(address, array("q", (5, 5, num_items, 0, 0, 0)).tobytes()) for num_items in (0, 2)
    ]
    with pytest.raises(InternalError, match="kernel 1 of a recorded step ended after 0 of 2 parts"):
        Program(launches, torch.empty(0, dtype=torch.uint8), Team()).run()


@pytest.mark.parametrize("num_terms", [128, 129, 777])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_launches_alone(num_terms: int, dtype: torch.dtype) -> None:
    """Rows that are filled up with zeros on their way to the weights, too."""
    weight = PackedWeight(torch.randn(40, num_terms).to(dtype), None, Team())
    x = torch.randn(3, num_terms).to(dtype)
    recording = record(lambda: weight.multiply(x), Arena())
    assert recording.num_steps == 1
    assert torch.equal(replayed(weight.multiply, x, x.neg()), weight.multiply(x.neg()))
