"""The view of a fleet from the statuses of its routers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from baton.values import ClusterStatus, WorkerStatus
from planner.fleet_view import DECODE, PREFILL, FleetView, WorkerView

LEAVING = "draining"  # the reason of a worker that will not be back


@dataclass
class FleetReader:
    """Reader of successive statuses. A router that was not read at one time adds no arrivals then."""

    _admitted: dict[str, int] = field(default_factory=dict)  # by router, at its last status
    _num_arrived: int = 0

    def read(self, at_s: float, statuses: Mapping[str, ClusterStatus]) -> FleetView:
        """Return the fleet at `at_s` from one status of each router, by the router's name."""
        for name, status in statuses.items():
            before = self._admitted.get(name, status.admitted_requests)
            self._num_arrived += max(status.admitted_requests - before, 0)
        self._admitted = {name: status.admitted_requests for name, status in statuses.items()}
        num_waiting = sum(status.waiting_requests for status in statuses.values())
        num_running = sum(status.running_requests for status in statuses.values())
        return FleetView(
            at_s,
            tuple(_workers(statuses.values())),
            num_waiting,
            sum(status.waiting_tokens for status in statuses.values()),
            self._num_arrived,
            num_running + num_waiting,
        )


def _workers(statuses: Iterable[ClusterStatus]) -> Iterator[WorkerView]:
    """Yield each worker once: routers list it by role, and several routers list it."""
    found: dict[str, dict[str, list[WorkerStatus]]] = {}
    for status in statuses:
        for worker in status.workers:
            if worker.able_roles and not worker.reason.startswith(LEAVING):
                found.setdefault(worker.address, {}).setdefault(worker.role, []).append(worker)
    for address, by_role in found.items():
        seen = [worker for workers in by_role.values() for worker in workers]
        best = max(seen, key=lambda each: each.serving)
        yield WorkerView(
            address,
            frozenset(best.able_roles),
            frozenset(best.roles),
            best.serving,
            **_prefill_values(by_role.get(PREFILL, ())),  # type: ignore[arg-type]
            **_decode_values(by_role.get(DECODE, ())),  # type: ignore[arg-type]
        )


def _prefill_values(seen: Sequence[WorkerStatus]) -> dict[str, float]:
    """Return what routers know of the prefill of one worker; nothing if none lists it so."""
    if not seen:
        return {}
    now = _latest(seen)
    return {
        "queued_tokens": now.queued_tokens,
        "prompt_rate": max(each.prompt_tokens_per_s for each in seen),
        "num_prompt_tokens": now.prompt_tokens,
    }


def _decode_values(seen: Sequence[WorkerStatus]) -> dict[str, float]:
    """Return what routers know of the decode of one worker; nothing if none lists it so."""
    if not seen:
        return {}
    now = _latest(seen)
    running = now.running_requests + now.queued_requests - now.open_sessions
    return {
        "running": max(running, 0),
        "landing": now.open_sessions,
        "most_running": max(now.max_batch_requests, 1),
        "pages_used": 1 - now.pages_free / now.pages_total if now.pages_total else 0.0,
        "token_s": max(each.token_s for each in seen),
        "num_output_tokens": now.output_tokens,
    }


def _latest(seen: Sequence[WorkerStatus]) -> WorkerStatus:
    """Return the latest of several reports: counters only grow."""
    return max(seen, key=lambda each: (each.serving, each.prompt_tokens + each.output_tokens))
