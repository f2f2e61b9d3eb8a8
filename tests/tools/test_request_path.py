"""The way of a reader that follows one plain request through the product."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Visits measure the way: jumps to a function of another file, by package of that function. The
# limits are some percent above the present counts. A change that simplifies the way lowers them. In
# the router, steps of the request machine's tables and its commands are jumps, too (152 before it).
MAX_VISITS = {
    "baton": 6,
    "decode": 54,
    "engine": 236,
    "models": 24,
    "pool": 142,
    "prefill": 44,
    "router": 192,
    "runtime": 96,
    "transfer": 140,
}
# Files alone measure it badly: merging two files against their sense lowers their number.
MAX_FILES = 152
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
def test_a_plain_request_has_a_short_way() -> None:
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
    assert {
        package: visits
        for package, visits in path["visits"].items()
        if visits > MAX_VISITS.get(package, 0)
    } == {}
    assert all(path["visits"][package] >= limit / 2 for package, limit in MAX_VISITS.items())
