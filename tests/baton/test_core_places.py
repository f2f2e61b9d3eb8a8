"""Placement of a local cluster's processes on cores."""

import pytest

from baton.core_places import core_places


@pytest.mark.parametrize(
    ("prefill", "decode", "cores", "workers", "router"),
    [
        (1, 1, (0, 1, 2, 3), (0, 1), (2, 3)),
        (2, 2, (4, 5, 6, 7), (4, 5, 6, 7), (6, 7)),
        (1, 1, (2, 3), (2, 3), (2, 3)),
        (2, 1, (0, 1, 2), (0, 1, 2), (0, 1, 2)),
        (1, 3, (0, 1, 2), (0, 1, 2, 1), (1, 2)),
        (1, 1, (5,), (5, 5), (5,)),
    ],
)
def test_routers_avoid_cores_of_prefill_workers_if_possible(
    prefill: int,
    decode: int,
    cores: tuple[int, ...],
    workers: tuple[int, ...],
    router: tuple[int, ...],
) -> None:
    """A router on the core of a prefill worker made that take half as long again; one that was kept
    to a decode worker's on a machine of two cores took a fifth of what that drew."""
    roles = {
        **{f"prefill-{index}": "prefill" for index in range(prefill)},
        **{f"decode-{index}": "decode" for index in range(decode)},
        "router": "router",
        "router-1": "router",
    }
    found = core_places(roles, cores)
    assert tuple(found[name] for name in roles) == (*((core,) for core in workers), router, router)


def test_roles_take_the_cores_they_were_given_in_turn() -> None:
    roles = {
        "prefill-0": "prefill",
        **{f"decode-{index}": "decode" for index in range(3)},
        "router": "router",
    }
    assert core_places(roles, (0, 1, 2), {"decode": (2, 7)}) == {
        "prefill-0": (0,),
        "decode-0": (2,),
        "decode-1": (7,),
        "decode-2": (2,),
        "router": (1,),
    }
    assert core_places(roles, (0, 1, 2), {"router": (1,)})["router"] == (1,)
