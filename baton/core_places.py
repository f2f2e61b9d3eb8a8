"""Which cores the processes of a local cluster keep to."""

from collections.abc import Mapping, Sequence

LOADS = {"prefill": 1.0, "decode": 0.6}
"""About how much of a core a worker takes while its cluster is busy; only their order and sums
count."""


def core_places(
    roles: Mapping[str, str], cores: Sequence[int], given: Mapping[str, Sequence[int]] | None = None
) -> dict[str, tuple[int, ...]]:
    """The cores of each name of `roles`, which are "prefill", "decode" and "router".

    A worker gets one, prefill workers first, of `cores` the one that has the least to do. Routers
    go from one to another of those that no worker has, or else no prefill worker; where that is a
    single one, which then draws, they have all: prefill workers pause, too. Roles in `given` take
    the cores there in turn.
    """
    given = given or {}
    loads, places = dict.fromkeys(cores, 0.0), dict[str, tuple[int, ...]]()
    for role, own in given.items():
        for place, name in enumerate(name for name, its in roles.items() if its == role):
            places[name] = (own[place % len(own)],)
            loads[own[place % len(own)]] = loads.get(own[place % len(own)], 0.0) + LOADS.get(
                role, 0.0
            )
    workers = [name for name, role in roles.items() if role in LOADS and role not in given]
    for name in sorted(workers, key=lambda each: -LOADS[roles[each]]):
        core = min(cores, key=loads.__getitem__)
        loads[core] += LOADS[roles[name]]
        places[name] = (core,)
    computing = {core for name, (core, *_) in places.items() if roles[name] == "prefill"}
    without = [core for core in cores if core not in computing]
    roamed = [core for core in cores if not loads[core]] or (without if len(without) > 1 else cores)
    return {**{name: tuple(roamed) for name, role in roles.items() if role == "router"}, **places}
