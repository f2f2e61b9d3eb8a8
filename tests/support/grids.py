"""Grids of which `make test` runs a few cases and `make test-long` the others."""

from collections.abc import Collection, Iterable

import pytest
from _pytest.mark.structures import ParameterSet


def mostly_long(cases: Iterable[object], *, kept: Collection[object]) -> list[ParameterSet]:
    """Return the cases as parameters of a test; those that are not in `kept` are long."""
    every = list(cases)
    unknown = [case for case in kept if case not in every]
    assert not unknown, f"not among the cases: {unknown}"
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in kept else pytest.mark.long,
        )
        for case in every
    ]
