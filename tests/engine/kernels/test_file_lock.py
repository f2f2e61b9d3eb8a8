"""One process at a time holds the lock; waits are bounded, and a missing file causes no failure."""

import subprocess
import sys
from pathlib import Path

from engine.kernels.host.codegen.file_lock import alone

HOLDER = """
import sys
from pathlib import Path
from engine.kernels.host.codegen.file_lock import alone
with alone(Path(sys.argv[1]), 2 ** 63 - 1, timeout_s=60) as held:
    print(held, flush=True)
    sys.stdin.read()
"""


def test_another_process_waits_and_then_continues_without_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        with alone(path, 2**63 - 1, timeout_s=0.2) as held:
            assert not held
        with alone(path, 0, timeout_s=0.0) as held:  # of another subject
            assert held
        holder.communicate()
    with alone(path, 2**63 - 1, timeout_s=0.2) as held:
        assert held


def test_a_lock_that_cannot_be_opened_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for path in (tmp_path / "absent" / "lock", tmp_path / "link"):
        with alone(path, 0, timeout_s=60) as held:
            assert not held
    assert not (tmp_path / "elsewhere").exists()
