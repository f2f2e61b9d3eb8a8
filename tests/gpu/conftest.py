"""Tests of the device side on a real GPU: `python -m pytest tests/gpu`. Elsewhere each is skipped
with its reason."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch


def reason_to_skip() -> str | None:
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    missing = [name for name in ("flashinfer", "triton") if find_spec(name) is None]
    if missing:
        return f"needs {' and '.join(missing)}: install the extra `gpu`"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "kernels are interpreted in this process: run pytest tests/gpu by itself"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = reason_to_skip()
    for item in items:
        if reason is not None and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def two_devices() -> list[torch.device]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    return [torch.device("cuda", index) for index in range(2)]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)


@pytest.fixture
def ucx() -> None:
    """Skip tests that transfer by UCX if it is missing."""
    _skip_without("ucxx")


@pytest.fixture
def whole_roles() -> None:
    """Skip tests that start prefill, decode and router if a dependency is missing."""
    _skip_without("grpc", "ucxx", "pydantic", "tokenizers")


def _skip_without(*names: str) -> None:
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        pytest.skip(
            f"needs {' and '.join(missing)}: install Baton with its dependencies and the extra `ucx`"
        )
