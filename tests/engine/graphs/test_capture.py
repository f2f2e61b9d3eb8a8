"""Errors of captures, without a device."""

import pytest

from engine.graphs.capture import _cause


def test_the_cause_of_a_failed_capture_is_its_first_error_in_one_line() -> None:
    """The end of a capture that has failed raises a second error during the first."""

    def fails_at_its_end() -> None:
        try:
            raise RuntimeError("operation not permitted when stream is capturing\nSearch for it")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    with pytest.raises(RuntimeError) as failed:
        fails_at_its_end()
    assert _cause(failed.value) == "operation not permitted when stream is capturing"
