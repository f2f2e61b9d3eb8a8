"""The script that checks and times everything on a GPU machine, with stand-ins for the machine and for its parts."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu_all.sh"
PARTS = ("warm", "tests", "model", "cluster", "layers", "handoff", "stages_ucx")
PYTHON = """#!/bin/bash
case "$*" in
*"$FAILS"*) echo half of it; echo why not >&2; exit 3 ;;
*"$HANGS"*) echo half of it; sleep 300 ;;
-c*) exit 1 ;;
-) cat >/dev/null; echo torch 0 ;;
*) echo "done: $*" ;;
esac
"""


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    for name, text in (("nvidia-smi", "#!/bin/bash\necho a GPU\n"), ("python", PYTHON)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": str(tmp_path / "python"),
            "FAILS": "nothing", "HANGS": "nothing"}


def run(machine: dict[str, str], out: Path, *parts: str) -> tuple[int, dict[str, str]]:
    """Exit status, and how each part ended."""
    done = subprocess.run([SCRIPT, out, *parts], env=machine, capture_output=True, text=True, timeout=60, check=False)
    lines = (out / "summary.txt").read_text().splitlines()
    return done.returncode, dict(line.split(": ", 1) for line in lines)


def test_a_part_that_fails_leaves_the_others_running(machine: dict[str, str], tmp_path: Path) -> None:
    status, ended = run({**machine, "FAILS": "bench.gpu_model"}, tmp_path / "out")
    assert status == 1
    assert {name: words.partition(",")[0] for name, words in ended.items() if name in PARTS} == {
        name: "failed (status 3)" if name == "model" else "ok" for name in PARTS}
    assert (tmp_path / "out" / "model.txt").read_text() == "half of it\n"
    assert (tmp_path / "out" / "model.err").read_text() == "why not\n"
    assert "-m bench.gpu_cluster" in (tmp_path / "out" / "cluster.txt").read_text()


def test_it_ends_in_time_and_keeps_what_was_told(machine: dict[str, str], tmp_path: Path) -> None:
    status, ended = run({**machine, "HANGS": "-m pytest", "GPU_ALL_SECONDS": "10"}, tmp_path / "out")
    assert status == 1
    assert ended["warm"].startswith("ok")
    assert "is kept" in ended["tests"]
    assert (tmp_path / "out" / "tests.txt").read_text() == "half of it\n"
    assert {ended[name] for name in PARTS[2:]} == {"not run, no time is left"}


def test_parts_can_be_chosen(machine: dict[str, str], tmp_path: Path) -> None:
    status, ended = run(machine, tmp_path / "out", "tests", "layers")
    assert status == 0
    assert [name for name in ended if name in PARTS] == ["tests", "layers"]
