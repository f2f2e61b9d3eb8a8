"""A modest number of cases per target in every run; `python -m tests.fuzz --cases 100000` tries
more."""

import pytest

from tests.fuzz.engine import Target, corpus_of, run
from tests.fuzz.targets import TARGETS

CASES = 1500


@pytest.mark.parametrize("name", TARGETS)
def test_damaged_bytes_are_refused_by_name(name: str) -> None:
    assert [str(finding) for finding in run(TARGETS[name], cases=CASES, seed=1)] == []


def test_a_parser_that_breaks_is_found() -> None:
    broken = Target("broken", lambda numbers: b"0123", lambda data: data.decode("ascii"), ())
    assert any(
        "UnicodeDecodeError" in finding.problem for finding in run(broken, cases=500, seed=1)
    )


def test_the_corpus_of_earlier_failures_is_not_empty() -> None:
    assert sum(len(corpus_of(target)) for target in TARGETS.values()) > 0
