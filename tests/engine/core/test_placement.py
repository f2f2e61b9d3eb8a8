"""A thread's device."""

import pytest
import torch

from engine.core.placement import HOST, use_in_this_thread
from engine.memory.staging import CudaCopies
from runtime.errors import ConfigError


@pytest.fixture
def made_current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The indices that torch, which refuses a device without one, hands to the driver."""
    indices = list[int]()
    monkeypatch.setattr(torch._C, "_cuda_setDevice", indices.append, raising=False)
    return indices


def test_a_device_without_an_index_is_the_first(made_current: list[int]) -> None:
    for device in (torch.device("cuda"), torch.device("cuda", 2), HOST):
        use_in_this_thread(device)
    assert made_current == [0, 2]


def test_copies_enter_it_too(made_current: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="cannot be used for handoffs"):  # there is no driver behind it
        CudaCopies(torch.device("cuda")).enter_thread()
    assert made_current == [0]
