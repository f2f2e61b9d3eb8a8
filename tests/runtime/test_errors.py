"""The error tree's own behavior; how errors travel is in test_status.py."""

import pytest

from runtime.errors import (
    BatonError,
    CapacityError,
    ConfigError,
    FieldViolation,
    InvalidRequestError,
    PeerLostError,
)

ERRORS = [
    PeerLostError("stage 1 of the pool died"),
    PeerLostError("gone", retry_after_s=3.0),
    CapacityError("full", resource="pages", retry_after_s=0.5),
    ConfigError("no", field="listen"),
    InvalidRequestError(FieldViolation("prompt", "is empty"), FieldViolation("n", "is 0")),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_copied_error_differs_only_in_its_traceback(error: BatonError) -> None:
    try:
        raise error
    except BatonError:
        other = error.again()
    assert other is not error
    assert (type(other), str(other), vars(other)) == (type(error), str(error), vars(error))
    assert error.__traceback__ is not None
    assert other.__traceback__ is None
