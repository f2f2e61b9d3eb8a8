"""Tests of what needs no torch do not wait for it."""

import os
import subprocess
import sys

from tests.architecture.source import ROOT
from tests.conftest import WITHOUT_TORCH

MOST_MODULES = 850  # the interpreter, pytest, its plugins, gRPC


def run(program: str) -> str:
    environment = {
        key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_collecting_them_loads_no_torch() -> None:
    folders = [f"tests/{name}" for name in WITHOUT_TORCH]
    run(f"""
import sys, pytest
assert pytest.main([*{folders!r}, "--collect-only", "-q", "-p", "no:cacheprovider"]) == 0
assert "torch" not in sys.modules
""")


def test_one_of_them_loads_little() -> None:
    """A count of modules says on every machine what seconds say on an idle one."""
    said = run("""
import sys, pytest
assert pytest.main(["tests/runtime/test_pairing.py", "-q", "-p", "no:cacheprovider"]) == 0
print(*sys.modules)
""")
    loaded = set(said.splitlines()[-1].split())
    assert len(loaded) < MOST_MODULES
    assert not loaded & {"torch", "numba", "numpy", "transformers", "tokenizers", "llguidance"}
