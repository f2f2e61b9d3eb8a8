"""Processes that know each other by DNS names find the one that moved."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.moving import MODULE, REFUSED

ROOT = Path(__file__).parents[2]
FOUND_S = 3.0


@pytest.mark.long
def test_named_peers_are_found_at_a_new_address_within_three_seconds() -> None:
    """A leader by its stages and by routers, a prefill worker by routers, a router by clients."""
    done = subprocess.run(
        [sys.executable, "-m", MODULE], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    if done.returncode == REFUSED:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout)
    assert set(found) == {
        "stage",
        "decode by name",
        "decode by DNS",
        "prefill by name",
        "prefill by DNS",
        "client",
        "client of threads",
    }
    assert {name: seconds for name, seconds in found.items() if seconds >= FOUND_S} == {}
