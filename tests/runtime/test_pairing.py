"""Digests that match: the same model, and not two different drafts."""

import pytest

from runtime.digests import may_pair, pairing_digest, share_draft

PLAIN, FIRST, SECOND = (pairing_digest("m", draft) for draft in ("", "d", "e"))


@pytest.mark.parametrize(
    ("one", "other", "pairs", "shares"),
    [
        (PLAIN, PLAIN, True, False),
        (FIRST, FIRST, True, True),
        (FIRST, PLAIN, True, False),
        (FIRST, SECOND, False, False),
        (PLAIN, pairing_digest("n", ""), False, False),
        (FIRST, pairing_digest("n", "d"), False, False),
    ],
)
def test_pairs(one: str, other: str, *, pairs: bool, shares: bool) -> None:
    for ends in ((one, other), (other, one)):
        assert (may_pair(*ends), share_draft(*ends)) == (pairs, shares)
