"""Assignment of a local cluster's processes to cores."""

from collections.abc import Mapping, Sequence

LOADS = {"worker": 1.0, "prefill": 1.0, "decode": 0.6}
"""Approximate load of a worker in cores while its cluster is busy; only order and sums matter."""


def core_places(
    roles: Mapping[str, str], cores: Sequence[int], given: Mapping[str, Sequence[int]] | None = None
) -> dict[str, tuple[int, ...]]:
    """Return the cores of each process of `roles`.

    `roles` maps names to "prefill", "decode", "worker" (both) or "router".

    A worker gets one core, the least loaded of `cores`, prefill workers first. A router may use the
    cores without a worker, or else those without a prefill worker. If fewer than two of the latter
    are left, it may use all cores, because prefill workers also pause. Roles in `given` use its
    cores in turn.
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
    computing = {
        core for name, (core, *_) in places.items() if roles[name] in ("prefill", "worker")
    }
    without = [core for core in cores if core not in computing]
    roamed = [core for core in cores if not loads[core]] or (without if len(without) > 1 else cores)
    return {**{name: tuple(roamed) for name, role in roles.items() if role == "router"}, **places}
