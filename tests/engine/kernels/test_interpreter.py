"""Whether kernels are interpreted is decided without torch (`tests/conftest.py`), and as torch
would decide it."""

import torch

from tests.conftest import has_gpu


def test_the_interpreter_is_chosen_without_a_device() -> None:
    assert has_gpu() is torch.cuda.is_available()
