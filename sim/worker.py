"""What simulated workers of both roles have in common: their process, and what they report."""

from abc import ABC, abstractmethod
from typing import Protocol

from pool.prefix.journal import PointJournal
from protos import worker_pb2
from runtime.version import WIRE_VERSION
from sim.cores import Processor
from sim.costs import Costs
from sim.network import Method, Server
from sim.prompts import VOCAB_SIZE, SimulatedPrompt

COMPATIBILITY = "simulated"
ARCHITECTURE = "Simulated"

Prompts = dict[str, SimulatedPrompt]
"""Of all requests under way, by their ids."""


class Watcher(Protocol):
    """Who is to notice what happens to a worker's process."""

    def woken(self) -> None:
        """It got a request."""

    def changed(self) -> None:
        """It begins to drain."""

    def died(self) -> None: ...

    def cut(self) -> None: ...

    def healed(self) -> None: ...


class SimulatedWorker(ABC):
    """One process. It may die and start anew, be slow, be cut off, and drain."""

    role = ""

    def __init__(self, address: str, costs: Costs, processor: Processor) -> None:
        self.address = address
        self.costs = costs
        self.processor = processor
        self.busy_s = 0.0  # it computed so far
        self.num_tokens = 0  # computed or drawn so far
        self.was_used = False  # it got a request, ever
        self._num_starts = 0
        self._is_draining = False
        self.watchers: dict[Watcher, None] = {}
        self.server = Server(address, self._methods())
        self.start()

    def start(self) -> None:
        """As a new incarnation, that has nothing."""
        self._num_starts += 1
        self._is_draining = False
        self.journal = self._begin()
        self.server.is_up = True

    def die(self) -> None:
        """At once."""
        self.processor.compute(is_computing=False)
        self.server.die()
        for watcher in tuple(self.watchers):
            watcher.died()

    def cut(self) -> None:
        """Nobody reaches it."""
        self.server.is_cut = True
        for watcher in tuple(self.watchers):
            watcher.cut()

    def heal(self) -> None:
        """The cut is over."""
        self.server.heal()
        for watcher in tuple(self.watchers):
            watcher.healed()

    def drain(self) -> None:
        """Hand requests back and take none."""
        self._is_draining = True
        for watcher in self.watchers:
            watcher.changed()

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
    def _reported(self, *, serving: bool, reason: str) -> worker_pb2.WorkerLoad:
        """All of a load. It is made with what it says: that takes half as long as to set one field
        after the other."""

    def _woken(self) -> None:
        self.was_used = True
        for watcher in self.watchers:
            watcher.woken()

    def info(self) -> worker_pb2.WorkerInfo:
        """Of this incarnation."""
        model, info = self.costs.model, self._described()
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
            )
        )
        return info

    def load(self) -> worker_pb2.WorkerLoad:
        """At this moment."""
        return self._reported(
            serving=not self._is_draining, reason="draining" if self._is_draining else ""
        )
