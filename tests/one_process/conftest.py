"""The checkpoint served here and its expected output."""

import logging

import pytest

from pool.prefix import block_reads
from pool.pulls import puller
from tests.support.cluster.reference import checkpoint, reference
from tests.support.models.grammars import wait_long_for_masks

__all__ = ["checkpoint", "reference"]


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_long_for_masks(monkeypatch)
    # Whether a prompt is pulled or read must not depend on how busy this machine is.
    for wait in ("OFFER_S", "LEAST_WAIT_S"):
        monkeypatch.setattr(puller, wait, 60.0)
    monkeypatch.setattr(block_reads, "RETRY", 1)


@pytest.fixture(autouse=True)
def _what_happened(caplog: pytest.LogCaptureFixture) -> None:
    """Let a failure show why requests were retried, too."""
    caplog.set_level(logging.INFO)
