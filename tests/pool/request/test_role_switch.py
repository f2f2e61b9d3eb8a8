"""The roles that a pool serves."""

import pytest

from pool.request.role_switch import RoleSwitch
from runtime.errors import InvalidRequestError, UnavailableError

BOTH = ("prefill", "decode")


def test_a_switched_pool_takes_no_requests_of_the_other_role() -> None:
    seen: list[tuple[str, ...]] = []
    switch = RoleSwitch(BOTH, BOTH)
    switch.on_switched = lambda: seen.append(switch.active)
    switch.check("prefill")
    switch.set(3, ["decode"])
    switch.check("decode")
    with pytest.raises(UnavailableError, match="no prefill requests: it was switched to decode"):
        switch.check("prefill")
    assert not switch.reason_against("")
    switch.set(4, ["decode", "prefill"])
    switch.check("prefill")
    assert seen == [("decode",), BOTH]


def test_a_repeated_switch_has_no_effect_and_a_late_one_is_refused() -> None:
    switch = RoleSwitch(BOTH, BOTH)
    switch.set(2, ["prefill"])
    switch.on_switched = pytest.fail
    switch.set(2, ["prefill"])
    for epoch, roles in ((2, ["decode"]), (1, ["prefill"]), (0, ["prefill"])):
        with pytest.raises(InvalidRequestError, match="epoch: must be larger than 2"):
            switch.set(epoch, roles)
    assert switch.active == ("prefill",)


@pytest.mark.parametrize(
    ("able", "roles", "says"),
    [
        (BOTH, [], "roles: must name at least one role"),
        (BOTH, ["router"], "roles: must be among prefill, decode, got 'router'"),
        (("decode",), ["prefill"], "roles: must be among decode, got 'prefill'"),
    ],
    ids=["none", "unknown", "not able"],
)
def test_roles_that_the_pool_cannot_serve_are_refused(
    able: tuple[str, ...], roles: list[str], says: str
) -> None:
    switch = RoleSwitch(able, able)
    with pytest.raises(InvalidRequestError) as refused:
        switch.set(1, roles)
    assert says in str(refused.value)
    assert (switch.active, switch.epoch) == (able, 0)
