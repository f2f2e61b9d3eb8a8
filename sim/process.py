"""Simulated worker processes: one role, or both with one memory and one core."""

from collections.abc import Iterable
from dataclasses import dataclass

from router.workers.worker import WorkerRole
from sim.costs import Costs
from sim.decode import DecodeWorker
from sim.prefill import PrefillWorker
from sim.surroundings import Surroundings
from sim.worker import SimulatedWorker
from worker.chunk_budget import STEP_RATIO, ChunkBudget

# Shares of a core while chunks and decode steps alternate.
CHUNK_WEIGHT = 2 * STEP_RATIO / (STEP_RATIO + 1)
STEP_WEIGHT = 2 / (STEP_RATIO + 1)


@dataclass(eq=False)
class SimulatedProcess:
    """One process. Its workers, one for each of its roles, live, die and drain together."""

    name: str
    workers: tuple[SimulatedWorker, ...]
    _num_ends: int = 0  # ends after which it has yet to start

    @property
    def role(self) -> str:
        """Return the role as `restart` faults name it."""
        return self.workers[0].role if len(self.workers) == 1 else "worker"

    @property
    def start_s(self) -> float:
        """Return the duration of a start, in seconds."""
        return max(worker.start_s for worker in self.workers)

    def set_roles(self, roles: Iterable[WorkerRole]) -> None:
        """Serve these of its roles from now on."""
        wanted = set(roles)
        for worker in self.workers:
            worker.switch(is_active=worker.role in wanted)

    def start(self) -> None:
        """Start again, empty, after as many calls of `die`."""
        self._num_ends -= 1
        if not self._num_ends:
            for worker in self.workers:
                worker.start()

    def die(self) -> None:
        """End at once, if it has not ended already."""
        self._num_ends += 1
        if self._num_ends == 1:
            for worker in self.workers:
                worker.die()

    def cut(self) -> None:
        """Cut the process off from the network."""
        for worker in self.workers:
            worker.cut()

    def heal(self) -> None:
        """End the cut."""
        for worker in self.workers:
            worker.heal()

    def drain(self) -> None:
        """Hand requests back and reject new ones."""
        for worker in self.workers:
            worker.drain()

    def slow_down(self, slowness: float) -> None:
        """Multiply the duration of all work by `slowness` from now on."""
        for worker in self.workers:
            worker.processor.slow_down(slowness)


class _StepsBeside:
    """The decode steps of a worker of both roles, for its chunks. Implements `ChunksBeside`."""

    def __init__(self, costs: Costs) -> None:
        self.budget = ChunkBudget(costs.prefill.chunk_tokens, costs.prefill.grid)
        self.decode: DecodeWorker | None = None  # created after the prefill worker

    @property
    def _is_stepping(self) -> bool:
        return self.decode is not None and self.decode.pool.num_running > 0

    def budget_tokens(self, most: int) -> int:
        return min(most, self.budget.tokens) if self._is_stepping else most

    def may_start(self) -> bool:
        return self.decode is None or not self.decode.pool.num_waiting

    def computed(self, num_tokens: int, seconds: float) -> None:
        if self._is_stepping:
            self.budget.computed(num_tokens, seconds)


def process_of(name: str, role: str, around: Surroundings) -> SimulatedProcess:
    """Return a process that serves "prefill", "decode", or both ("worker")."""
    address = f"{name}:1"
    if role == "worker":
        return SimulatedProcess(name, _of_both_roles(name, around))
    processor = around.machine.processor(name)
    if role == "prefill":
        return SimulatedProcess(name, (PrefillWorker(address, around, processor),))
    return SimulatedProcess(name, (DecodeWorker(address, around, processor),))


def _of_both_roles(name: str, around: Surroundings) -> tuple[PrefillWorker, DecodeWorker]:
    address = f"{name}:1"
    chunks, steps = around.machine.processors(name, (CHUNK_WEIGHT, STEP_WEIGHT))
    beside = _StepsBeside(around.costs)
    prefill = PrefillWorker(address, around, chunks, beside)
    decode = DecodeWorker(address, around, steps, prefill, on_span=beside.budget.stepped)
    beside.decode = decode
    prefill.process_workers = decode.process_workers = (prefill, decode)
    return prefill, decode
