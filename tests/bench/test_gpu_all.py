"""The script that checks and times everything on a GPU machine, with fakes for the machine and the
script's parts."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu_all.sh"
PARTS = ("warm", "tests", "model", "cluster", "layers", "handoff", "stages_ucx")
PYTHON = """#!/bin/bash
case "$*" in
"-c import nvidia;"*) echo "$WHEELS" ;;
*"$FAILS"*) echo half of it; echo why not >&2; exit 3 ;;
*"$HANGS"*) echo half of it; sleep 300 ;;
-c*) exit 1 ;;
-) cat >/dev/null; echo torch 0 ;;
*) echo "done: $* $CUDA_HOME $LIBRARY_PATH" ;;
esac
"""
CC = """#!/bin/bash
cat >/dev/null
while (($#)); do [[ $1 == -o ]] && echo "$*" >"$2"; shift; done
"""


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    for name, text in (("nvidia-smi", "#!/bin/bash\necho a GPU\n"), ("python", PYTHON), ("cc", CC)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHON": str(tmp_path / "python"),
        "FAILS": "nothing",
        "HANGS": "nothing",
        "WHEELS": "",
        "CUDA_HOME": "",
        "LIBRARY_PATH": "",
    }


def run(machine: dict[str, str], out: Path, *parts: str) -> tuple[int, dict[str, str]]:
    """Return the exit status and the outcome of each part."""
    done = subprocess.run(
        [SCRIPT, out, *parts], env=machine, capture_output=True, text=True, timeout=60, check=False
    )
    lines = (out / "summary.txt").read_text().splitlines()
    return done.returncode, dict(line.split(": ", 1) for line in lines)


def test_a_part_that_fails_leaves_the_others_running(
    machine: dict[str, str], tmp_path: Path
) -> None:
    status, ended = run({**machine, "FAILS": "bench.gpu_model"}, tmp_path / "out")
    assert status == 1
    assert {name: words.partition(",")[0] for name, words in ended.items() if name in PARTS} == {
        name: "failed (status 3)" if name == "model" else "ok" for name in PARTS
    }
    assert (tmp_path / "out" / "model.txt").read_text() == "half of it\n"
    assert (tmp_path / "out" / "model.err").read_text() == "why not\n"
    assert "-m bench.gpu_cluster" in (tmp_path / "out" / "cluster.txt").read_text()


def test_it_ends_in_time_and_keeps_its_output(machine: dict[str, str], tmp_path: Path) -> None:
    status, ended = run(
        {**machine, "HANGS": "-m pytest", "GPU_ALL_SECONDS": "10"}, tmp_path / "out"
    )
    assert status == 1
    assert ended["warm"].startswith("ok")
    assert "is kept" in ended["tests"]
    assert (tmp_path / "out" / "tests.txt").read_text() == "half of it\n"
    assert {ended[name] for name in PARTS[2:]} == {"not run, no time is left"}


def test_parts_can_be_chosen(machine: dict[str, str], tmp_path: Path) -> None:
    status, ended = run(machine, tmp_path / "out", "tests", "layers")
    assert status == 0
    assert [name for name in ended if name in PARTS] == ["tests", "layers"]


@pytest.mark.parametrize("comes_with_wheels", [True, False])
def test_kernels_are_linked_on_machines_with_runtime_libraries_only(
    machine: dict[str, str],
    tmp_path: Path,
    comes_with_wheels: bool,  # noqa: FBT001
) -> None:
    """The linker finds the runtime's own library and a fake of the driver's."""
    toolkit = tmp_path / "nvidia" / "cu13"
    for file in (toolkit / "bin" / "nvcc", toolkit / "lib" / "libcudart.so.13"):
        file.parent.mkdir(parents=True)
        file.touch(0o755)
    found = {"WHEELS": str(toolkit.parent)} if comes_with_wheels else {"CUDA_HOME": str(toolkit)}
    out = tmp_path / "out"
    status, _ = run({**machine, **found}, out, "layers")
    assert status == 0
    if Path("/usr/local/cuda/bin/nvcc").exists() and comes_with_wheels:
        toolkit = Path("/usr/local/cuda")  # the machine's own comes first
    assert (out / "layers.txt").read_text().split()[-2:] == [str(toolkit), f"{out}/links"]
    assert (out / "links" / "libcudart.so").resolve().name.startswith("libcudart.so")
    assert "-soname,libcuda.so.1" in (out / "links" / "libcuda.so").read_text()
