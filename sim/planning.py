"""The planner over a simulated fleet."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.fleet_view import FleetView, WorkerView
from router.workers.worker import Worker, WorkerRole
from sim.decode import DecodeWorker
from sim.prefill import PrefillWorker
from sim.process import SimulatedProcess
from sim.router import RouterProcess

PLAN_INTERVAL_S = 1.0


@dataclass(frozen=True)
class RoleChange:
    """A switch of a process to `roles`, `at_s` after the earliest possible request."""

    at_s: float
    name: str
    roles: tuple[str, ...]


def view_of(
    at_s: float, processes: Mapping[str, SimulatedProcess], routers: Sequence[RouterProcess]
) -> FleetView:
    """Return what a planner sees of a fleet."""
    up = [router for router in routers if router.is_up]
    waiting = [router.services.admission for router in up]
    running = sum(router.num_running for router in up)
    num_waiting = sum(admission.num_waiting for admission in waiting)
    known = [
        {(worker.role, worker.address): worker for worker in router.services.directory.workers}
        for router in up
    ]
    return FleetView(
        at_s,
        tuple(_worker_view(process, known) for process in processes.values()),
        num_waiting,
        round(sum(admission.waiting_tokens for admission in waiting)),
        sum(admission.num_let_in for admission in waiting),
        running + num_waiting,
    )


def _worker_view(
    process: SimulatedProcess, known: Sequence[Mapping[tuple[WorkerRole, str], Worker]]
) -> WorkerView:
    queued = running = num_prompt_tokens = num_output_tokens = 0
    pages_used = prompt_rate = token_s = 0.0
    most = 1
    for worker in process.workers:
        load = worker.load()
        seen = [each[WorkerRole(worker.role), worker.address] for each in known]
        if isinstance(worker, PrefillWorker):
            queued, num_prompt_tokens = load.queued_tokens, load.prompt_tokens
            prompt_rate = max((each.prefill_pace.tokens_per_s or 0.0 for each in seen), default=0.0)
        elif isinstance(worker, DecodeWorker):
            info = worker.info()
            running = load.running_requests + load.queued_requests - load.open_sessions
            num_output_tokens = load.output_tokens
            most = info.max_batch_requests
            pages_used = 1 - load.pages_free / info.pages_total
            token_s = max(
                (each.decode_pace.token_s(each.num_booked) or 0.0 for each in seen), default=0.0
            )
    return WorkerView(
        process.name,
        frozenset(worker.role for worker in process.workers),
        frozenset(process.roles),
        process.is_serving,
        queued,
        running,
        most,
        pages_used,
        prompt_rate,
        token_s,
        num_prompt_tokens,
        num_output_tokens,
    )
