"""The planner's process: read the routers, plan, switch roles, export the saturation."""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack, suppress

from baton.client import AsyncBatonClient
from baton.roles import set_roles
from baton.values import ClusterStatus
from planner.config import PlannerConfig
from planner.fleet_view import DECODE, PREFILL
from planner.planner import RolePlanner
from planner.reader import FleetReader
from planner.routers import RouterClients
from runtime.clock import Clock, SystemClock
from runtime.errors import BatonError
from runtime.observe.exposition import Exposition, new_registry
from runtime.observe.metrics.planner import PlannerMetrics
from runtime.process.supervision import StopSignal, background
from runtime.security.access import ChannelSecurity, client_security
from runtime.version import VERSION

READ_S = 5.0  # limit of one reading of one router
SEEN_S = 5.0  # limit for the routers to hear of the roles that workers have got
LOOK_S = 0.05

logger = logging.getLogger(__name__)


class PlannerService:
    """The loop of the planner over routers."""

    def __init__(
        self,
        routers: RouterClients,
        planner: RolePlanner,
        metrics: PlannerMetrics,
        security: ChannelSecurity,
        clock: Clock,
        *,
        acts: bool,
    ) -> None:
        """Create the loop. If it does not act, plans are only logged."""
        self._routers = routers
        self._planner = planner
        self._metrics = metrics
        self._security = security
        self._clock = clock
        self._acts = acts
        self._reader = FleetReader()
        self._unread: frozenset[str] = frozenset()

    async def run(self, interval_s: float) -> None:
        """Plan at an interval until cancelled."""
        while True:
            began_s = self._clock.now()
            await self.step()
            await asyncio.sleep(max(began_s + interval_s - self._clock.now(), 0.0))

    async def step(self) -> None:
        """Read all routers, and switch roles if that is better."""
        statuses = await self._read()
        if not statuses:
            return
        view = self._reader.read(self._clock.now(), statuses)
        plan = self._planner.plan(view)
        for role in (PREFILL, DECODE):
            self._metrics.saturation.labels(role).set(plan.saturation[role])
            if role in plan.wanted:
                self._metrics.wanted.labels(role).set(plan.wanted[role])
        # Roles are switched on before others are switched off, so that each is always served.
        active = {worker.address: worker.active for worker in view.workers}
        wider = dict[str, frozenset[str]]()
        for address, roles in plan.switches.items():
            before = active.get(address, roles)
            if self._acts and not before >= roles and await self._set(address, before | roles):
                wider[address] = before | roles
        await self._until_seen(wider)
        await asyncio.gather(
            *(self._switch(address, roles) for address, roles in plan.switches.items())
        )

    async def _until_seen(self, roles_of: Mapping[str, frozenset[str]]) -> None:
        """Wait until the routers that answer know that these workers serve these roles.

        Workers report one by one. A router must not hear that one stopped serving a role before it
        hears that another began.
        """
        if not roles_of:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(SEEN_S):
                while not _know((await self._read()).values(), roles_of):  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_S)

    async def _read(self) -> dict[str, ClusterStatus]:
        """Return the status of every router that answers in time."""
        clients = await self._routers.refresh(self._clock.now())
        answers = await asyncio.gather(
            *(self._status(name, client) for name, client in clients.items())
        )
        found = {
            name: answer
            for name, answer in zip(clients, answers, strict=True)
            if answer is not None
        }
        self._unread = frozenset(clients) - found.keys()
        return found

    async def _status(self, name: str, client: AsyncBatonClient) -> ClusterStatus | None:
        try:
            async with asyncio.timeout(READ_S):
                status = await client.cluster_status()
        except (BatonError, TimeoutError) as error:
            self._metrics.readings.labels("failed").inc()
            if name not in self._unread:
                reason = str(error) or f"no answer in {READ_S:g} s"
                logger.warning("cannot read a router", extra={"router": name, "reason": reason})
            return None
        self._metrics.readings.labels("read").inc()
        return status

    async def _switch(self, address: str, roles: frozenset[str]) -> None:
        outcome = "planned"
        if self._acts:
            outcome = "switched" if await self._set(address, roles) else "failed"
        self._metrics.switches.labels(outcome).inc()
        if outcome != "failed":
            names = ",".join(sorted(roles))
            logger.info("roles %s", outcome, extra={"worker": address, "roles": names})

    async def _set(self, address: str, roles: frozenset[str]) -> bool:
        """Set the roles of a worker; return whether it did."""
        try:
            await set_roles(address, sorted(roles), self._security)
        except BatonError as error:
            logger.warning("cannot switch roles", extra={"worker": address, "reason": str(error)})
            return False
        return True


def _know(statuses: Iterable[ClusterStatus], roles_of: Mapping[str, frozenset[str]]) -> bool:
    """Return whether all routers with these statuses know that the workers serve these roles."""
    return all(
        any(worker.address == address and roles <= {*worker.roles} for worker in status.workers)
        for status in statuses
        for address, roles in roles_of.items()
    )


async def serve(config: PlannerConfig, stop: StopSignal) -> None:
    """Plan until `stop`.

    Raises:
        ConfigError: a certificate, a token file or the metrics port cannot be used.
    """
    security = client_security(
        tls_ca=config.tls_ca,
        tls_cert=config.tls_cert,
        tls_key=config.tls_key,
        token_file=config.token_file,
    )
    registry = new_registry(role="planner", version=VERSION)
    metrics = PlannerMetrics.create(registry)
    async with AsyncExitStack() as stack:
        if config.metrics_port is not None:
            exposition = Exposition.start(
                registry, port=config.metrics_port, host=config.metrics_host
            )
            stack.callback(exposition.close)
            logger.info("metrics", extra={"port": exposition.port})
        routers = await stack.enter_async_context(RouterClients(config.router, security))
        planner = RolePlanner(config.promise)
        service = PlannerService(
            routers, planner, metrics, security, SystemClock(), acts=not config.dry_run
        )
        logger.info("planner runs", extra={"slo": config.slo, "dry_run": config.dry_run})
        async with background(stop, service.run(config.interval_s)):
            await stop.wait()
