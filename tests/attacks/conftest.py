"""What attacks need of the pools that they meet."""

import pytest

from pool.prefix import block_reads


@pytest.fixture(autouse=True)
def _always_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a prompt is pulled or read must not depend on how busy this machine is."""
    monkeypatch.setattr(block_reads, "RETRY", 1)
