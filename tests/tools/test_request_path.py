"""How many files one plain request runs through: a reader who follows it passes them all."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_FILES = 120
# Files that every request certainly passes: the script would count few files, too, if it saw few
# threads.
CERTAIN = {
    "baton/client.py",
    "router/request/flow.py",
    "prefill/scheduler.py",
    "transfer/agent/sender.py",
    "transfer/agent/stage_transfer.py",
    "decode/scheduler.py",
    "engine/pipeline/stages.py",
    "models/decoder.py",
}


@pytest.mark.long
def test_a_plain_request_passes_at_most_120_files() -> None:
    counted = subprocess.run(
        [sys.executable, "-m", "tools.request_path", "--json"],
        cwd=ROOT,
        timeout=280,
        check=True,
        capture_output=True,
        text=True,
    )
    path = json.loads(counted.stdout)
    assert set(path["listed"]) >= CERTAIN
    assert path["files"] <= MAX_FILES, "\n".join(path["listed"])
