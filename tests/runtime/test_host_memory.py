"""Memory as kernels show it: of the machine, and within control groups of both generations."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.process.host_memory import (
    HostMemory,
    host_memory,
    is_out_of_memory,
    memory_left,
    num_oom_kills,
)

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MACHINE = {
    "proc/meminfo": f"MemTotal:  {16 * GIB >> 10} kB\nMemFree: 5 kB\nMemAvailable: {10 * GIB >> 10} kB\n"
}


def test_a_machine_without_groups(tmp_path: Path) -> None:
    assert host_memory(write(tmp_path, MACHINE)) == HostMemory(16 * GIB, 10 * GIB)


def test_the_tightest_group_above_a_process_counts_v2(tmp_path: Path) -> None:
    """The pod has 4 GiB of which 3 are used, 1 of it files; the container of it names no limit."""
    root = write(
        tmp_path,
        {
            **MACHINE,
            "proc/self/cgroup": "0::/pod/container\n",
            "sys/fs/cgroup/pod/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/pod/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            "sys/fs/cgroup/pod/container/memory.max": "max\n",
            "sys/fs/cgroup/pod/container/memory.current": "7\n",
        },
    )
    assert host_memory(root) == HostMemory(4 * GIB, 2 * GIB, is_limited=True)


def test_a_container_sees_its_own_group_as_the_top_v1(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            **MACHINE,
            "proc/self/cgroup": "5:devices:/x\n4:memory:/docker/abc\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/memory.stat": "inactive_file 9\ntotal_inactive_file 1024\n",
        },
    )
    assert host_memory(root) == HostMemory(2 * GIB, GIB + 1024, is_limited=True)


def test_a_limit_above_the_machine_is_none(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            **MACHINE,
            "proc/self/cgroup": "4:memory:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "5\n",
        },
    )
    assert host_memory(root) == HostMemory(16 * GIB, 10 * GIB)


def test_this_machine_has_memory() -> None:
    memory = host_memory()
    assert 0 < memory.available_bytes <= memory.total_bytes


def test_the_kernel_counts_processes_killed_for_memory(tmp_path: Path) -> None:
    assert (
        num_oom_kills(write(tmp_path, {"proc/vmstat": "pgfault 5\noom_kill 3\npgrefill 7\n"})) == 3
    )
    assert num_oom_kills(tmp_path / "without") == 0


def test_errors_of_allocators_are_known() -> None:
    with pytest.raises(MemoryError) as too_much:
        bytearray(1 << 62)
    cuda = (
        "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 15.77 GiB"
    )
    for error in (
        too_much.value,
        OSError(errno.ENOMEM, "mmap"),
        RuntimeError(cuda),
        RuntimeError("CUDA error: out of memory"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    ):
        assert is_out_of_memory(error)
    for other in (
        OSError(errno.ENOENT, "gone"),
        RuntimeError("shape mismatch"),
        ValueError("out of memory"),
    ):
        assert not is_out_of_memory(other)


def test_the_limit_of_a_process_bounds_free_memory() -> None:
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30)); "
        "from runtime.process.host_memory import memory_left; print(memory_left())"
    )
    limited = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert limited.stdout.rstrip().endswith(
        " MiB are free, of which ulimit -v lets a process have 3072"
    )
    assert memory_left().endswith(" MiB are free")
