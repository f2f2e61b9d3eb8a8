"""Tests of what needs no torch do not wait for it."""

import os
import resource
import subprocess
import sys

from tests.architecture.source import ROOT
from tests.conftest import WITHOUT_TORCH

START_S = 2.0  # of one core, for one test: the interpreter, pytest, its plugins, gRPC
TRIES = 5  # the first may write bytecode, and a core that others use counts more


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


def test_one_of_them_runs_in_less_than_two_seconds() -> None:
    used_s: list[float] = []
    while len(used_s) < TRIES and min(used_s, default=START_S) >= START_S:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        said = run("""
import pytest
assert pytest.main(["tests/runtime/test_pairing.py", "-q", "-p", "no:cacheprovider"]) == 0
""")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert " passed in " in said
        used_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(used_s) < START_S, used_s
