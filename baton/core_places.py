"""Which core each process of a local cluster keeps to."""

from collections.abc import Mapping, Sequence

LOADS = {"prefill": 1.0, "decode": 0.6, "router": 0.4}
"""About how much of a core a process of a role takes while its cluster is busy; only their order and sums count."""


def core_places(roles: Mapping[str, str], cores: Sequence[int],
                given: Mapping[str, Sequence[int]] | None = None) -> dict[str, int]:
    """A core for each name of `roles`, which are "prefill", "decode" and "router". Roles in `given` take those of it in
    turn; each of the others goes, the busiest first, to the one of `cores` that has the least to do."""
    given = given or {}
    loads, places = dict.fromkeys(cores, 0.0), {}
    num_placed = dict.fromkeys(given, 0)
    for name in sorted(roles, key=lambda each: (roles[each] not in given, -LOADS[roles[each]])):
        role = roles[name]
        if role in given:
            place = given[role][num_placed[role] % len(given[role])]
            num_placed[role] += 1
        else:
            place = min(loads, key=loads.__getitem__)
        loads[place] = loads.get(place, 0.0) + LOADS[role]
        places[name] = place
    return places
