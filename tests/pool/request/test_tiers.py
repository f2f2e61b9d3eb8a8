"""Counts of a prompt's cached tokens by tier."""

import pytest

from pool.request.handler import Tiers


@pytest.mark.parametrize(
    ("tiers", "num_cached", "pulled", "disk"),
    [
        (Tiers(), 64, 0, 0),
        (Tiers(64), 64, 0, 0),
        (Tiers(64, 192), 192, 128, 0),
        (Tiers(64, 192, 256), 256, 128, 64),
        (Tiers(64, 0, 256), 256, 0, 192),
        (Tiers(64, 192, 128), 192, 128, 0),  # another request read less than was pulled here
        (Tiers(64, 192, 256), 224, 128, 32),  # the last ones were evicted before the prompt began
        (Tiers(64, 192, 256), 32, 0, 0),
        (Tiers(64, 32, 0), 64, 0, 0),  # what another prompt had pulled, and this one waited for
    ],
)
def test_tokens_count_for_the_first_tier_that_has_them(
    tiers: Tiers, num_cached: int, pulled: int, disk: int
) -> None:
    assert tiers.counts(num_cached) == {"pulled_tokens": pulled, "disk_tokens": disk}
