"""A worker that runs out of memory reports it in one line."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pool.stage.config import WorkerConfig
from pool.stage.plan import naming_memory, plan_stage
from runtime.errors import ConfigError
from runtime.process.supervision import EXIT_CONFIG

DEMO = Path(__file__).parents[2] / "demo" / "model"
LIMIT_BYTES = 2 << 30  # a process that loads nothing takes half of it


def test_a_failed_allocation_while_loading_names_the_total_memory() -> None:
    config = WorkerConfig(model=DEMO, num_pages=100)
    with (
        pytest.raises(
            ConfigError,
            match=r"^out of memory while loading \d+ MiB of weights and allocating "
            r"layers 0-8, 99 pages of 64 .* MiB are free: a smaller --memory-mb or ",
        ),
        naming_memory(config, plan_stage(config)),
    ):
        torch.zeros(1 << 62, dtype=torch.uint8)


def test_other_errors_are_unchanged() -> None:
    config = WorkerConfig(model=DEMO, num_pages=100)
    with pytest.raises(RuntimeError, match="shape"), naming_memory(config, plan_stage(config)):
        torch.zeros(3).view(2)


def test_a_worker_without_memory_for_its_cache_ends_with_one_line() -> None:
    """2,258 MiB of cache, in a process that may have 2,048."""
    command = [
        sys.executable,
        "-m",
        "decode",
        "--model",
        str(DEMO),
        "--memory-mb",
        "4000",
        "--max-running",
        "2048",
        "--log-level",
        "warning",
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES)),
    )
    assert done.returncode == EXIT_CONFIG, done.stderr
    assert done.stderr.startswith(
        "decode: out of memory while loading 4 MiB of weights and allocating "
    )
    assert done.stderr.count("\n") == 1
