"""The interface between the process of a pool and its role, prefill or decode."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry

from engine.loop import Scheduler
from engine.pipeline.stage_executor import LayerObserver
from pool.pipeline.leader import Leader
from pool.pipeline.reclaimer import MemoryReclaimer
from pool.prefix.journal import PointJournal
from pool.pulls.puller import Puller
from pool.request.adapters import PoolAdapters
from pool.request.entry import RankScheduler
from pool.request.handler import EventPost
from pool.request.role_switch import RoleSwitch
from pool.stage.config import WorkerConfig
from pool.stage.handoff import LayerMark
from pool.stage.metrics import LeaderMeters, ReportingScheduler
from pool.stage.stage import Stage
from pool.tiers.block_tier import BlockTier
from runtime.rpc.server import GrpcServer
from transfer.agent.agent import TransferAgent


class PoolScheduler(Scheduler, RankScheduler, Protocol):
    """A scheduler that an engine loop runs and a pool reports on."""


class PoolRanks(ReportingScheduler, Protocol):
    """The `pool.request.entry.DataRanks` of a role's schedulers."""

    @property
    def schedulers(self) -> Sequence[PoolScheduler]: ...

    def has_adapter(self, adapter: str) -> bool:
        """Return whether a request has this adapter, on the engine thread."""
        ...

    def flush(self) -> int:
        """Empty the prefix caches on the engine thread; return the number of evicted pages."""
        ...


@dataclass(frozen=True)
class LeaderParts:
    """The components that a role's services are built from."""

    config: WorkerConfig
    stage: Stage
    leader: Leader
    reclaimer: MemoryReclaimer
    meters: LeaderMeters
    post: EventPost
    registry: CollectorRegistry
    switch: RoleSwitch
    adapters: PoolAdapters
    tiers: Sequence[Sequence[BlockTier]]  # of the prefix caches, by data rank
    pullers: Sequence[Puller]  # by data rank; none if the pool has no prefix cache to pull into


class RoleLeader(Protocol):
    """A role as the leader of its pool runs it."""

    @property
    def ranks(self) -> PoolRanks: ...

    @property
    def views(self) -> Mapping[str, ReportingScheduler]:
        """Return the schedulers whose load the routers see by role, if there are several roles."""
        ...

    @property
    def journal(self) -> PointJournal:
        """Return the journal of its prefix caches, empty if it has none."""
        ...

    def add_service(self, server: GrpcServer, parts: LeaderParts) -> None: ...

    async def warm_up(self, parts: LeaderParts) -> None:
        """Run one token through all stages of the pool."""
        ...


class PoolRole(Protocol):
    """The differences between pools that prefill, that decode, and that do both."""

    name: str
    services: Mapping[
        str, str
    ]  # full gRPC name of each role that it can serve, also its health name
    speculates: bool  # whether it verifies drafts, or only lets a draft model prefill prompts
    keeps_states: bool  # whether its prefix cache keeps recurrent states as well
    reads_prompts: bool  # whether its forwards have several tokens of a request

    def first_roles(self, config: WorkerConfig) -> tuple[str, ...]:
        """Return the roles that it serves from its start, until they are switched."""
        ...

    def max_held(self, config: WorkerConfig) -> int:
        """Return how many requests may hold memory at a time when `max_running` compute."""
        ...

    def observe_layers(self, agent: TransferAgent, mark: LayerMark | None) -> LayerObserver | None:
        """Return the observer of computed layers, or None.

        On a device, `mark` records a layer's place in the queue of work.
        """
        ...

    def lead(self, config: WorkerConfig, stage: Stage) -> RoleLeader:
        """Create the schedulers over this stage's pools and the services that use them."""
        ...
