"""Workers known by several addresses: dual-stack hosts, or duplicate targets.

One incarnation is one worker: one of its addresses is used, and the others are its fallback.
"""

import logging

from router.workers.worker import Worker, WorkerRole

logger = logging.getLogger(__name__)

_Key = tuple[WorkerRole, str]


class Aliases:
    """Workers of each incarnation, and the address in use."""

    def __init__(self) -> None:
        self._incarnations: dict[_Key, str] = {}  # by role and address
        # By role and incarnation, in order of introduction.
        self._groups: dict[_Key, list[Worker]] = {}

    def changed(self, worker: Worker) -> list[Worker]:
        """Record the incarnation of `worker`; return the workers whose use has changed."""
        key = worker.role, worker.address
        if self._incarnations.get(key) == worker.incarnation:
            group = self._groups.get((worker.role, worker.incarnation), [])
            return _choose(group) if len(group) > 1 else []
        changed = self.forget(worker)
        if worker.incarnation:
            self._incarnations[key] = worker.incarnation
            group = self._groups.setdefault((worker.role, worker.incarnation), [])
            group.append(worker)
            changed += _choose(group)
            if worker.same_as:
                logger.warning(
                    "two addresses are one %s worker, which counts once: %s and %s",
                    worker.role,
                    worker.same_as,
                    worker.address,
                )
        return changed

    def forget(self, worker: Worker) -> list[Worker]:
        """Remove `worker`; return the workers whose use has changed."""
        incarnation = self._incarnations.pop((worker.role, worker.address), "")
        group = self._groups.get((worker.role, incarnation), [])
        rest = [other for other in group if other is not worker]
        if rest:
            self._groups[worker.role, incarnation] = rest
        else:
            self._groups.pop((worker.role, incarnation), None)
        alone = [worker] if worker.stand_in_for("") else []
        return alone + _choose(rest)


def _choose(group: list[Worker]) -> list[Worker]:
    """Keep the address in use while it works, else switch to one that does; return the changed
    workers.
    """
    if not group:
        return []
    working = [worker for worker in group if worker.can_serve]
    used = next((worker for worker in working if not worker.same_as), (working or group)[0])
    return [
        worker for worker in group if worker.stand_in_for("" if worker is used else used.address)
    ]
