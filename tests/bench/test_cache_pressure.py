"""Requests on pools that cannot keep what they share, a third of them dropped."""

import json
import subprocess
import sys

import pytest


@pytest.mark.long
def test_nothing_is_lost_leaked_or_wrong() -> None:
    command = [
        sys.executable,
        "-m",
        "bench.cache_pressure",
        "--requests",
        "300",
        "--round",
        "150",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)
    assert values["right"] + values["dropped"] == 300
    assert (values["wrong"], values["lost"], values["leaked"]) == (0, 0, 0)
    assert min(values["evicted_pages"], values["decode_evicted_pages"]) > 100
    assert min(values["cached_tokens"], values["unsent_tokens"]) > 0
