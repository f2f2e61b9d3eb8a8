"""Simulation of a whole fleet and its load in virtual time."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from baton.load import Outcome, Slo
from baton.workload import Planned, Turn
from planner.planner import RolePlanner
from router.text.model_facts import ModelLimits
from runtime.clock import LoopClock
from runtime.errors import ConfigError, InternalError
from runtime.process.supervision import task_group
from sim.clients import Answered, Clients
from sim.cores import Machine
from sim.costs import Costs
from sim.decode import DecodeWorker
from sim.faults import Mishap, check_target, unleash
from sim.planning import PLAN_INTERVAL_S, RoleChange, SimulatedPlanner
from sim.prefill import PrefillWorker
from sim.process import process_of
from sim.prompts import VOCAB_SIZE
from sim.router import RouterOptions, RouterProcess
from sim.surroundings import Surroundings
from sim.time import keep_all, run_virtually
from sim.worker import ARCHITECTURE

WARM_UP_S = 2.0  # from the start of all processes to the first request
COOL_DOWN_S = 5.0  # from the end of the last request to the final checks
LEAST_INTERVAL_S = 0.01  # between two samples: about the duration of a pool's round
# Samples while requests arrive; a long run has up to twice as many.
NUM_SAMPLES = 240

_WasAnswered = dict[tuple[int, int], "asyncio.Future[bool]"]
"""By conversation and turn: whether it was answered."""


@dataclass(frozen=True)
class FleetConfig:
    """Configuration of a simulation. Equal values give equal runs."""

    num_prefill: int = 1
    num_decode: int = 1
    num_routers: int = 1
    costs: Costs = field(default_factory=Costs)
    router: RouterOptions = field(default_factory=RouterOptions)
    faults: tuple[Mishap, ...] = ()
    seed: int = 0
    num_both: int = 0  # workers that prefill and decode
    promise: Slo | None = None  # for the planner, which switches the roles of these workers

    def check(self) -> None:
        """Check that both roles are served, and that a planner has workers to switch.

        Raises:
            ConfigError: they are not, or it has none.
        """
        if self.promise is not None and not self.num_both:
            raise ConfigError(
                "--planner switches the roles of --worker workers; there are none", field="planner"
            )
        for role, count in (("prefill", self.num_with_prefill), ("decode", self.num_with_decode)):
            if not count:
                raise ConfigError(f"no worker of the fleet serves {role}", field=role)

    @property
    def num_with_prefill(self) -> int:
        """Return the number of workers that can prefill."""
        return self.num_prefill + self.num_both

    @property
    def num_with_decode(self) -> int:
        """Return the number of workers that can decode."""
        return self.num_decode + self.num_both


@dataclass(frozen=True)
class FleetState:
    """State of a fleet at one moment, as sums over its processes.

    `at_s` counts from the earliest possible request.
    """

    at_s: float
    waiting: int  # requests queued in routers
    queued_tokens: int  # in prefill workers
    running: int  # requests in decode pools
    pages_used: float  # share of the pages of decode pools
    prefill_busy_s: float  # cumulative
    decode_busy_s: float


@dataclass(frozen=True)
class FleetRun:
    """Result of a simulation.

    `wall_s` is its real duration; `pick_s` is the mean real time in which a router chose a worker.
    """

    answered: list[Answered]
    samples: list[FleetState]
    duration_s: float
    wall_s: float
    num_preemptions: int
    num_picks: int
    pick_s: float
    moved_bytes: float
    switches: list[RoleChange]  # of roles, by the planner

    @property
    def outcomes(self) -> list[Outcome]:
        """Return the outcomes in order of the requests' ends."""
        return [each.outcome for each in self.answered]


def simulate(config: FleetConfig, load: Sequence[Planned]) -> FleetRun:
    """Simulate every request of the load to its end.

    Raises:
        ConfigError: a fault names an unknown target.
        InternalError: an invariant is violated: a request ended twice or never, or memory is held
            without a request.
    """

    async def play() -> FleetRun:
        return await Fleet(config).play(load)

    return run_virtually(play())


class Fleet:
    """All processes of a simulation. Build inside an event loop; `play` may be called once."""

    def __init__(self, config: FleetConfig) -> None:
        self._loop = asyncio.get_running_loop()
        self._clock = LoopClock(self._loop)
        self._began_s = time.perf_counter()
        costs = config.costs
        roles = {
            f"{role}-{index}": role
            for role, count in (
                ("prefill", config.num_prefill),
                ("decode", config.num_decode),
                ("worker", config.num_both),
            )
            for index in range(count)
        }
        around = Surroundings(costs, Machine(costs.machine, roles))
        self._processes = {name: process_of(name, role, around) for name, role in roles.items()}
        self._workers = [
            worker for process in self._processes.values() for worker in process.workers
        ]
        self._prefill = [each for each in self._workers if isinstance(each, PrefillWorker)]
        self._decode = [each for each in self._workers if isinstance(each, DecodeWorker)]
        facts = ModelLimits(
            "simulated",
            ARCHITECTURE,
            VOCAB_SIZE,
            costs.model.max_context_tokens,
            costs.model.num_layers,
            (),
        )
        by_role = {(worker.role, worker.address): worker for worker in self._workers}
        self._routers = {
            f"router-{index}": RouterProcess.build(
                config.router,
                by_role,
                costs.network.latency_s,
                self._clock,
                random.Random(f"{config.seed}/router/{index}"),
                facts,
            )
            for index in range(config.num_routers)
        }
        self._clients = Clients(
            list(self._routers.values()),
            random.Random(f"{config.seed}/clients"),
            around.prompts,
            around.machine,
        )
        self._faults = config.faults
        self._planner = (
            None
            if config.promise is None
            else SimulatedPlanner(RolePlanner(config.promise), self._routers, self._processes)
        )
        self._samples: list[FleetState] = []

    async def play(self, load: Sequence[Planned]) -> FleetRun:
        """Run the simulation; see `simulate`."""
        for fault in self._faults:
            check_target(fault, self._processes, self._routers)
        async with task_group() as beside:
            for router in self._routers.values():
                router.start(beside)
            await asyncio.sleep(WARM_UP_S)
            keep_all()
            start_s = self._loop.time()
            others = [
                beside.create_task(self._look(start_s, load[-1].at_s / NUM_SAMPLES)),
                *(
                    []
                    if self._planner is None
                    else [beside.create_task(self._plan(self._planner, start_s))]
                ),
                *(
                    beside.create_task(unleash(fault, self._processes, self._routers))
                    for fault in self._faults
                ),
            ]
            num_sent = await self._answered(load, start_s)
            duration_s = self._loop.time() - start_s
            for task in others:
                task.cancel()
            await asyncio.sleep(COOL_DOWN_S)
            self._check(num_sent)
            for router in self._routers.values():
                router.die()
        return self._run(duration_s)

    async def _answered(self, load: Sequence[Planned], start_s: float) -> int:
        """Have a load answered; return the number of requests that were sent."""
        turns = {
            (planned.turn.session, planned.turn.number): self._loop.create_future()
            for planned in load
            if planned.turn is not None
        }
        later = [
            (index, planned.turn, planned)
            for index, planned in enumerate(load)
            if planned.turn is not None and planned.turn.after
        ]
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._follow(turns, turn, index, planned, start_s))
                for index, turn, planned in later
            ]
            for index, planned in enumerate(load):
                if planned.turn is None or not planned.turn.after:
                    await asyncio.sleep(start_s + planned.at_s - self._loop.time())
                    group.create_task(self._ask(turns, index, planned))
        return len(load) - sum(not task.result() for task in tasks)

    async def _ask(self, turns: _WasAnswered, index: int, planned: Planned) -> None:
        was_answered = await self._clients.ask(index, planned)
        if planned.turn is not None:
            turns[planned.turn.session, planned.turn.number].set_result(was_answered)

    async def _follow(
        self, turns: _WasAnswered, turn: Turn, index: int, planned: Planned, start_s: float
    ) -> bool:
        """Ask after the turns before; return whether all of these were answered."""
        for number in turn.after:
            if not await turns[turn.session, number]:
                turns[turn.session, turn.number].set_result(False)
                return False
        await asyncio.sleep(turn.pause_s)
        await self._ask(turns, index, replace(planned, at_s=self._loop.time() - start_s))
        return True

    async def _look(self, start_s: float, interval_s: float) -> None:
        """Take samples until cancelled."""
        num_pages = sum(worker.costs.decode.num_pages for worker in self._decode)
        interval_s = max(interval_s, LEAST_INTERVAL_S)
        while True:
            now = self._clock.now()
            # In a large fleet few workers are used.
            sources = [worker for worker in self._prefill if worker.was_used]
            pools = [worker.pool for worker in self._decode if worker.was_used]
            pages_used = sum(worker.pages_used for worker in self._decode if worker.was_used)
            self._samples.append(
                FleetState(
                    now - start_s,
                    sum(router.services.admission.num_waiting for router in self._routers.values()),
                    sum(worker.queued_tokens for worker in sources),
                    sum(pool.num_held for pool in pools),
                    pages_used / num_pages,
                    sum(worker.busy_s for worker in sources),
                    sum(pool.busy_s for pool in pools),
                )
            )
            if len(self._samples) == 2 * NUM_SAMPLES:
                del self._samples[::2]
                interval_s *= 2
            await asyncio.sleep(interval_s)

    async def _plan(self, planner: SimulatedPlanner, start_s: float) -> None:
        """Switch roles as planned, until cancelled."""
        while True:
            planner.step(self._loop.time() - start_s)
            await asyncio.sleep(PLAN_INTERVAL_S)

    def _check(self, num_requests: int) -> None:
        """Check the invariants after the last request.

        Raises:
            InternalError: an invariant is violated.
        """
        if len(self._clients.answered) != num_requests:
            raise InternalError(
                f"{num_requests} requests came, {len(self._clients.answered)} ended"
            )
        for worker in self._workers:
            if worker.num_requests:
                raise InternalError(
                    f"{worker.address} holds {worker.num_requests} requests after their ends"
                )
            worker.check()
        for name, router in self._routers.items():
            booked = sum(worker.num_booked for worker in router.services.directory.workers)
            if router.is_up and booked:
                raise InternalError(f"{name} has {booked} requests booked after their ends")
        sent = sum(each.interface.num_sent - each.interface.num_vain for each in self._prefill)
        received = sum(each.num_received_bytes for each in (*self._prefill, *self._decode))
        if abs(sent - received) > 1e-6 * sent:
            raise InternalError(f"{sent:.0f} bytes left prefill workers, {received:.0f} arrived")

    def _run(self, duration_s: float) -> FleetRun:
        picks = [router.picks() for router in self._routers.values()]
        num_picks = sum(count for count, _ in picks)
        picked_s = sum(seconds for _, seconds in picks)
        return FleetRun(
            self._clients.answered,
            self._samples,
            duration_s,
            time.perf_counter() - self._began_s,
            sum(worker.pool.num_preemptions for worker in self._decode),
            num_picks,
            picked_s / max(num_picks, 1),
            sum(each.interface.num_sent for each in self._prefill),
            [] if self._planner is None else self._planner.changes,
        )
