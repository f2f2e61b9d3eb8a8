"""First output of `make demo` and `make test`: nothing that takes a minute is silent."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("target", "steps"),
    [
        ("demo", ["pip install", "baton demo"]),
        ("test", ["pip install", "engine.kernels.host.aot.compile_all", "-m pytest"]),
    ],
)
def test_steps_that_take_long_show_how_far_they_are(
    tmp_path: Path, target: str, steps: list[str]
) -> None:
    """In a folder of its own, where nothing has been made yet. `pip` draws its own progress unless
    it is quiet, and tests/engine/kernels/test_precompile.py holds that of kernels."""
    (tmp_path / "Makefile").symlink_to(ROOT / "Makefile")
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    planned = subprocess.run(
        ["make", "-n", target], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    ).stdout
    at = [planned.index(step) for step in steps]
    assert at == sorted(at)
    assert "--quiet" not in planned
    assert "-qq" not in planned
