"""Counts of a prompt's cached tokens by the place that they were copied from."""

import pytest

from pool.request.handler import Brought


@pytest.mark.parametrize(
    ("reached", "num_cached", "expected"),
    [
        ({}, 64, {}),
        ({"pulled": 192}, 192, {"pulled": 128}),
        ({"pulled": 192, "disk": 256}, 256, {"pulled": 128, "disk": 64}),
        ({"pulled": 0, "disk": 256}, 256, {"pulled": 0, "disk": 192}),
        # Another request read less than was pulled here.
        ({"pulled": 192, "disk": 128}, 192, {"pulled": 128, "disk": 0}),
        # The last ones were evicted before the prompt began.
        ({"pulled": 192, "disk": 256}, 224, {"pulled": 128, "disk": 32}),
        ({"pulled": 192, "disk": 256}, 32, {"pulled": 0, "disk": 0}),
        # What another prompt had pulled, and this one waited for.
        ({"pulled": 32, "disk": 0}, 64, {"pulled": 0, "disk": 0}),
        (
            {"host": 128, "pulled": 192, "disk": 192, "server": 320},
            320,
            {"host": 64, "pulled": 64, "disk": 0, "server": 128},
        ),
    ],
)
def test_tokens_count_for_the_first_place_that_has_them(
    reached: dict[str, int], num_cached: int, expected: dict[str, int]
) -> None:
    """The first 64 tokens are in memory."""
    assert Brought(64, reached).counts(num_cached) == {
        f"{place}_tokens": count for place, count in expected.items()
    }
