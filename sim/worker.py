"""What simulated workers of both roles have in common: their process, and the reports that the real ones send."""

import asyncio
from abc import ABC, abstractmethod
from typing import cast

from pool.prefix.journal import PointJournal
from pool.watch import Context, WorkerService
from protos import worker_pb2
from sim.costs import Costs
from sim.network import Method, Server, SimulatedCall

COMPATIBILITY = "simulated"
ARCHITECTURE = "Simulated"
VOCAB_SIZE = 1 << 31
WATCH = "/baton.v1.Worker/Watch"


class SimulatedWorker(ABC):
    """One process. It may die and start anew, be slow, be cut off, and drain."""

    role = ""

    def __init__(self, address: str, costs: Costs) -> None:
        self.address = address
        self.costs = costs
        self.slowness = 1.0  # everything takes so many times as long
        self.busy_s = 0.0  # it computed so far
        self.num_tokens = 0  # computed or drawn so far
        self._num_starts = 0
        self._is_draining = False
        self._watchers: set[asyncio.Task[None]] = set()
        self.server = Server(address, self._methods() | {WATCH: self._watch})
        self.start()

    def start(self) -> None:
        """As a new incarnation, that has nothing."""
        self._num_starts += 1
        self._is_draining = False
        self._service = WorkerService(self._info, self._load, self._begin(), self._flush)
        self.server.is_up = True

    def die(self) -> None:
        """At once."""
        self.server.die()

    def drain(self) -> None:
        """Hand requests back and take none."""
        self._is_draining = True
        self._service.changed()

    def slow_down(self, slowness: float) -> None:
        """From now on."""
        self.slowness = slowness

    @property
    def incarnation(self) -> str:
        return f"{self.address}/{self._num_starts}"

    @property
    @abstractmethod
    def start_s(self) -> float:
        """How long a start takes."""

    @property
    @abstractmethod
    def num_requests(self) -> int:
        """That it has."""

    @abstractmethod
    def check(self) -> None:
        """Raises InternalError if memory is held by no request, or counts do not add up."""

    @abstractmethod
    def _begin(self) -> PointJournal:
        """Begin empty; returns the journal of the new cache."""

    @abstractmethod
    def _methods(self) -> dict[str, Method]:
        """What the role serves."""

    @abstractmethod
    def _described(self) -> worker_pb2.WorkerInfo:
        """What differs between roles."""

    @abstractmethod
    def _reported(self) -> worker_pb2.WorkerLoad:
        """What differs between roles."""

    def _info(self) -> worker_pb2.WorkerInfo:
        model, info = self.costs.model, self._described()
        info.MergeFrom(worker_pb2.WorkerInfo(
            role=self.role, incarnation=self.incarnation, architecture=ARCHITECTURE, compatibility=COMPATIBILITY,
            vocab_size=VOCAB_SIZE, max_context_tokens=model.max_context_tokens, num_layers=model.num_layers,
            page_size=model.page_size))
        return info

    def _load(self) -> worker_pb2.WorkerLoad:
        load = self._reported()
        load.serving, load.reason = not self._is_draining, "draining" if self._is_draining else ""
        load.start_s = self.start_s
        return load

    async def _flush(self) -> int:
        """Empty the prefix cache; returns its pages."""
        return 0

    def _watch(self, call: SimulatedCall) -> None:
        task = asyncio.get_running_loop().create_task(self._report(call))
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)

        def gone() -> None:
            task.cancel()

        call.on_gone = gone

    async def _report(self, call: SimulatedCall) -> None:
        async for response in self._service.Watch(call.request, cast(Context, None)):  # it asks nothing of the context
            call.send(response)
