"""Cores that workers share, as those of one machine do: who is busy makes the others slower."""

from collections.abc import Callable

from sim.costs import BesideCosts

OTHER = {"prefill": "decode", "decode": "prefill"}


class SharedCores:
    """Of all workers of a fleet: how many times as long those of a role take for the others that are busy."""

    def __init__(self, costs: BesideCosts, num_prefill: int, num_decode: int) -> None:
        self._num_workers = {"prefill": num_prefill, "decode": num_decode}
        self._num_busy = {"prefill": 0, "decode": 0}
        self._beside_all = {"prefill": costs.prefill, "decode": costs.decode}
        self._num_cores = {"prefill": costs.prefill_cores or num_prefill, "decode": costs.decode_cores or num_decode}
        self._listeners: dict[str, list[Callable[[], None]]] = {"prefill": [], "decode": []}

    def on_change(self, role: str, changed: Callable[[], None]) -> None:
        """Call `changed` whenever workers of this role become slower or faster, if they ever do."""
        if self._beside_all[role] > 1:
            self._listeners[OTHER[role]].append(changed)
        if self._num_cores[role] < self._num_workers[role]:
            self._listeners[role].append(changed)

    def busy(self, role: str, *, is_busy: bool) -> None:
        """One worker more computes, or one less."""
        self._num_busy[role] += 1 if is_busy else -1
        for changed in self._listeners[role]:
            changed()

    def slowness(self, role: str) -> float:
        """Now; it grows evenly with the busy workers of the other role, and with those of its own that have no core for
        themselves."""
        other = OTHER[role]
        beside = 1 + (self._beside_all[role] - 1) * self._num_busy[other] / self._num_workers[other]
        return beside * max(1.0, self._num_busy[role] / self._num_cores[role])
