"""A start is measured as a user sees it; one that fails says why."""

import os
from dataclasses import asdict
from pathlib import Path

import pytest

from baton.cluster_config import demo_model
from bench.start import start
from runtime.errors import UnavailableError


@pytest.mark.long
async def test_a_start_has_all_its_times() -> None:
    started = await start(demo_model(), ("--aggregated", "--log-level", "info"), os.environ)
    assert min(asdict(started).values()) > 0


async def test_a_failed_start_has_its_reason(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"baton up ended: .*nothing does not exist"):
        await start(tmp_path / "nothing", (), os.environ)
