"""The building blocks of exact numerics keep an element's bits at any position; and a thread's
device."""

from collections.abc import Iterator

import pytest
import torch

from engine.core.numerics import HOST, silu, use_in_this_thread
from engine.memory.staging import CudaCopies
from runtime.errors import ConfigError


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu(dtype: torch.dtype) -> None:
    x = torch.linspace(-30, 30, 1001).to(dtype)
    expected = x.double() / (1 + torch.exp(-x.double()))
    torch.testing.assert_close(
        silu(x).double(), expected, rtol=1e-6 if dtype is torch.float32 else 8e-3, atol=1e-6
    )
    assert silu(x).dtype is dtype
    assert silu(torch.tensor([-200.0, 200.0])).tolist() == [0.0, 200.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [5, 24, 64, 96, 704])
def test_silu_of_a_row_does_not_depend_on_the_others(
    threads: int, dtype: torch.dtype, width: int
) -> None:
    x = (torch.randn(331, width, generator=torch.Generator().manual_seed(width)) * 4).to(dtype)
    whole = silu(x)
    for start, stop in ((0, 1), (1, 2), (3, 10), (7, 200), (100, 331)):
        assert torch.equal(silu(x[start:stop]), whole[start:stop])
    wide = torch.cat([x, x], -1)[
        :, :width
    ]  # rows apart in memory, as halves of a fused product are
    assert torch.equal(silu(wide), whole)


def test_silu_keeps_the_shape(threads: int) -> None:
    x = torch.randn(1, 331, 704)
    assert torch.equal(silu(x)[0], silu(x[0]))


def test_silu_of_nothing() -> None:
    assert silu(torch.empty(0, 64)).shape == (0, 64)


@pytest.fixture
def made_current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the device indices that torch, which refuses a missing device, passes to the
    driver."""
    indices = list[int]()
    monkeypatch.setattr(torch._C, "_cuda_setDevice", indices.append, raising=False)
    return indices


def test_a_device_without_an_index_is_the_first(made_current: list[int]) -> None:
    for device in (torch.device("cuda"), torch.device("cuda", 2), HOST):
        use_in_this_thread(device)
    assert made_current == [0, 2]


def test_copies_enter_it_too(made_current: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="cannot be used for handoffs"):  # there is no driver
        CudaCopies(torch.device("cuda")).enter_thread()
    assert made_current == [0]
