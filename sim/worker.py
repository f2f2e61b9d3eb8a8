"""Common part of simulated workers: their process, and their reports."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from pool.prefix.journal import PointJournal
from protos import worker_pb2
from runtime.errors import DrainingError, UnavailableError
from runtime.version import WIRE_VERSION
from sim.cores import Processor
from sim.costs import Costs
from sim.network import Method, Server
from sim.prompts import VOCAB_SIZE, SimulatedPrompt

COMPATIBILITY = "simulated"
ARCHITECTURE = "Simulated"

SimulatedPrompts = dict[str, SimulatedPrompt]
"""Prompts of all active requests, by request id."""


class Watcher(Protocol):
    """Observer of a worker's process."""

    def woken(self) -> None:
        """Handle the arrival of a request."""

    def changed(self) -> None:
        """Handle the beginning of a drain."""

    def died(self) -> None: ...

    def cut(self) -> None: ...

    def healed(self) -> None: ...


class SimulatedWorker(ABC):
    """One worker process. It may die and restart, be slow, be cut off, and drain."""

    role = ""

    def __init__(self, address: str, costs: Costs, processor: Processor) -> None:
        self.address = address
        self.costs = costs
        self.processor = processor
        self.busy_s = 0.0  # compute time so far
        self.num_tokens = 0  # tokens computed or generated so far
        self.num_received_bytes = 0.0  # of handoffs or pulls
        self.was_used = False  # whether it ever got a request
        self._num_starts = 0
        self._is_draining = False
        self.is_active = True  # whether it serves its role
        # The workers of a process of several roles, this one included.
        self.process_workers: Sequence[SimulatedWorker] = ()
        self.watchers: dict[Watcher, None] = {}
        self.server = Server(address, self._methods())
        self.start()

    def start(self) -> None:
        """Start a new, empty incarnation."""
        self._num_starts += 1
        self._is_draining = False
        self.is_active = True
        self.journal = self._begin()
        self.server.is_up = True

    def die(self) -> None:
        """End the process at once."""
        self.processor.compute(is_computing=False)
        self.server.die()
        for watcher in tuple(self.watchers):
            watcher.died()

    def cut(self) -> None:
        """Cut the worker off from the network."""
        self.server.is_cut = True
        for watcher in tuple(self.watchers):
            watcher.cut()

    def heal(self) -> None:
        """End the cut."""
        self.server.heal()
        for watcher in tuple(self.watchers):
            watcher.healed()

    def drain(self) -> None:
        """Hand requests back and reject new ones."""
        self._is_draining = True
        for watcher in self.watchers:
            watcher.changed()

    def switch(self, *, is_active: bool) -> None:
        """Serve new requests or reject them. Those that run go on."""
        if is_active != self.is_active:
            self.is_active = is_active
            for watcher in self.watchers:
                watcher.changed()

    def check_serving(self) -> None:
        """Check that the worker serves new requests.

        Raises:
            BatonError: it drains, or was switched to another role.
        """
        if self._is_draining:
            raise DrainingError(f"the {self.role} worker drains")
        if not self.is_active:
            raise UnavailableError(f"the worker takes no {self.role} requests")

    @property
    def copies(self) -> PointJournal:
        """Return the journal of what its own tiers have."""
        return PointJournal()

    @property
    def incarnation(self) -> str:
        return f"{self.address}/{self._num_starts}"

    @property
    @abstractmethod
    def start_s(self) -> float:
        """Return the duration of a start, in seconds."""

    @property
    @abstractmethod
    def num_requests(self) -> int:
        """Return the number of requests on the worker."""

    @abstractmethod
    def check(self) -> None:
        """Check memory and counts.

        Raises:
            InternalError: memory is held without a request, or counts do not add up.
        """

    @abstractmethod
    def _begin(self) -> PointJournal:
        """Begin empty; return the journal of the new prefix cache."""

    @abstractmethod
    def _methods(self) -> dict[str, Method]:
        """Return the methods that the role serves."""

    @abstractmethod
    def _described(self) -> worker_pb2.WorkerInfo:
        """Return the fields of the info that differ between roles."""

    @abstractmethod
    def _reported(self, *, serving: bool, reason: str) -> worker_pb2.WorkerLoad:
        """Return a complete load report.

        All fields are passed to the constructor, which takes half the time of setting them one by
        one.
        """

    def _woken(self) -> None:
        self.was_used = True
        for watcher in self.watchers:
            watcher.woken()

    def info(self) -> worker_pb2.WorkerInfo:
        """Return the info of this incarnation."""
        model = self.costs.model
        info = self._described()
        info.MergeFrom(
            worker_pb2.WorkerInfo(
                role=self.role,
                incarnation=self.incarnation,
                architecture=ARCHITECTURE,
                compatibility=COMPATIBILITY,
                vocab_size=VOCAB_SIZE,
                max_context_tokens=model.max_context_tokens,
                num_layers=model.num_layers,
                page_size=model.page_size,
                wire_version=WIRE_VERSION,
                roles=[worker.role for worker in self.process_workers] or [self.role],
            )
        )
        return info

    def load(self) -> worker_pb2.WorkerLoad:
        """Return the current load."""
        if self._is_draining:
            return self._reported(serving=False, reason="draining")
        load = self._reported(
            serving=self.is_active, reason="" if self.is_active else "it was switched off"
        )
        if self.process_workers:
            load.roles.extend(worker.role for worker in self.process_workers if worker.is_active)
        return load
