import pytest

from router.request.priorities import PriorityLimits
from runtime.errors import ConfigError
from runtime.security.access import ANYBODY, Caller, certified

LIMITS = PriorityLimits.parse(["batch=10", "ops=-100", "spiffe://here/client/a=-5", "*=1"])


@pytest.mark.parametrize(
    ("caller", "lowest"),
    [
        (ANYBODY, 1),
        (Caller("token:batch", frozenset({"batch"})), 10),
        (Caller("token:ops", frozenset({"ops"})), -100),
        (Caller("x", frozenset({"other"})), 1),
        (Caller("x", frozenset({"batch", "ops", "other"})), -100),
        (certified({"peer_uri": [b"spiffe://here/client/a"], "x509_common_name": [b"ops"]}), -5),
        (certified({"x509_common_name": [b"ops"]}), -100),
        (certified({}), 1),
    ],
)
def test_the_name_decides(caller: Caller, lowest: int) -> None:
    assert LIMITS.most_urgent(caller) == lowest


def test_the_most_urgent_priority_of_other_clients_is_zero() -> None:
    assert (
        PriorityLimits().most_urgent(ANYBODY)
        == PriorityLimits.parse(["ops=-3"]).most_urgent(ANYBODY)
        == 0
    )


@pytest.mark.parametrize("entry", ["ops", "=1", "ops=", "ops=x", "ops=-101", "ops=101"])
def test_an_invalid_limit_is_refused_by_name(entry: str) -> None:
    with pytest.raises(ConfigError, match="NAME=PRIORITY"):
        PriorityLimits.parse([entry])


def test_certificates_of_several_names_are_one_client_in_any_order() -> None:
    one, other = certified({"peer_dns": [b"a", b"b"]}), certified({"peer_dns": [b"b", b"a"]})
    assert one == other
    assert one.identity == "certificate:a|b"
