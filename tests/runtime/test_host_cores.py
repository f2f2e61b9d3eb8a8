"""Cores as kernels show them: those a process is kept to, and quotas of control groups of both
generations."""

import os
from pathlib import Path

import pytest

from runtime.process.host_cores import num_cores


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/pod/a\n", "sys/fs/cgroup/cpu.max": "350000 100000\n"}, 3),
        (
            {
                "proc/self/cgroup": "0::/pod/a\n",
                "sys/fs/cgroup/pod/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/pod/a/cpu.max": "50000 100000\n",
            },
            1,
        ),
        (
            {
                "proc/self/cgroup": "3:memory:/x\n2:cpu,cpuacct:/x\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            2,
        ),
        (
            {
                "proc/self/cgroup": "2:cpu,cpuacct:/x\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            8,
        ),
    ],
)
def test_the_smallest_quota_above_a_process_counts(
    tmp_path: Path, files: dict[str, str], cores: int
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert num_cores(tmp_path) == cores
