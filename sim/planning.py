"""The planner over a simulated fleet: it reads the simulated routers as it reads real ones."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.wire import cluster_status_of
from planner.planner import RolePlanner
from planner.reader import FleetReader
from protos import generation_pb2
from router.workers.worker import WorkerRole
from sim.process import SimulatedProcess
from sim.router import RouterProcess

PLAN_INTERVAL_S = 1.0


@dataclass(frozen=True)
class RoleChange:
    """A switch of a process to `roles`, `at_s` after the earliest possible request."""

    at_s: float
    name: str
    roles: tuple[str, ...]


@dataclass
class SimulatedPlanner:
    """A planner with the routers that it reads and the processes that it switches."""

    planner: RolePlanner
    routers: Mapping[str, RouterProcess]
    processes: Mapping[str, SimulatedProcess]
    changes: list[RoleChange] = field(default_factory=list)
    _reader: FleetReader = field(default_factory=FleetReader)

    def step(self, at_s: float) -> None:
        """Read the routers that are up, and switch roles as planned."""
        statuses = {
            name: cluster_status_of(_status(router))
            for name, router in self.routers.items()
            if router.is_up
        }
        if not statuses:
            return
        plan = self.planner.plan(self._reader.read(at_s, statuses))
        for address, roles in plan.switches.items():
            name = address.partition(":")[0]
            self.changes.append(RoleChange(at_s, name, tuple(sorted(roles))))
            self.processes[name].set_roles(map(WorkerRole, roles))


def _status(router: RouterProcess) -> generation_pb2.GetClusterStatusResponse:
    services = router.services
    return generation_pb2.GetClusterStatusResponse(
        waiting_requests=services.admission.num_waiting,
        running_requests=router.num_running,
        workers=services.directory.status(),
        waiting_tokens=round(services.admission.waiting_tokens),
        admitted_requests=services.admission.num_let_in,
    )
