"""Tiny checkpoints, written once per test session."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.models.checkpoints import make_checkpoint

CheckpointMaker = Callable[..., Path]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> CheckpointMaker:
    """Return a maker of checkpoints: `checkpoint("llama")` is the folder of that family's tiny one;
    options as in `make_checkpoint`."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return lambda name, **options: make_checkpoint(folder, name, **options)


@pytest.fixture
def broken(checkpoint: CheckpointMaker, tmp_path: Path) -> Path:
    """Return a private copy of a checkpoint, to damage."""
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
