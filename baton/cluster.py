"""A whole Baton cluster on this machine, with one process per router and per stage of a pool.

    async with LocalCluster(ClusterConfig(model=demo_model(), decode_pp=2), sink=print_line) as
    cluster:
        ...cluster.address...                                # serving, by gRPC health

        cluster.processes["decode-0.1"].kill()               # restarts at the same address

All processes start in parallel. Leaders announce their ports in files that their stages and the
routers read. On CPUs, each worker is pinned to one core (`core_places.py`). Leaving the block in
any way ends every process.
"""

import asyncio
import tempfile
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from baton.client import AsyncBatonClient
from baton.cluster_config import ClusterConfig
from baton.cluster_plan import GATEWAY, ClusterPlan
from baton.fork_server import Child, ForkServer, ForkServerLink, Spawn, spawn
from baton.process import LogSink, ProcessSpec, RoleProcess
from baton.scrape import scrape_config
from baton.values import WorkerStatus
from baton.waiting import reason_of, until_cluster_serves, until_serving
from runtime.clock import Deadline, LoopClock
from runtime.config import Address, parse_address
from runtime.errors import ConfigError, UnavailableError
from runtime.model_files.tokenizer_files import find_tokenizer, make_tokenizer
from runtime.observe.log import styled_line
from runtime.process.announce import Announcement
from runtime.security.access import PeerRole

_NARRATOR = "baton"
_REAP_S = 5.0
_POLL_S = 0.1
PROGRESS_S = 5.0  # between two reports of a slow start


class LocalCluster:
    """Async context manager that runs a cluster; the cluster serves inside the block."""

    def __init__(self, config: ClusterConfig, *, sink: LogSink) -> None:
        self._config = config
        self._plan = ClusterPlan(config)
        self._sink = sink
        self._is_quiet = False
        self._folder = tempfile.TemporaryDirectory(prefix="baton-")
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._fork_server: ForkServer | None = None  # one per cluster
        self._link: ForkServerLink | None = None
        self.processes: dict[str, RoleProcess] = {}

    @property
    def address(self) -> str:
        """Return the address of the first router."""
        return self.addresses[0]

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return the addresses of all routers."""
        announcements = [self.processes[name].announcement for name in self._plan.router_names]
        return tuple(
            announcement.address for announcement in announcements if announcement is not None
        )

    @property
    def http_address(self) -> str:
        """Return the address of the gateway, or "" if there is none."""
        announcement = self.processes[GATEWAY].announcement
        assert announcement is not None
        return announcement.address

    @property
    def status_page(self) -> str:
        """Return the URL of the first router's page, or "" if it serves no metrics."""
        where = self.processes[self._plan.router_names[0]].announcement
        if where is None or where.metrics_port is None:
            return ""
        return f"http://{Address(parse_address(where.address).host, where.metrics_port)}/"

    @property
    def transport_text(self) -> str:
        """Return a text that says on which devices UCX listens."""
        return self._plan.transport_text

    def write_scrape_config(self) -> Path:
        """Write a Prometheus configuration for the running processes; it is deleted with the
        cluster."""
        path = Path(self._folder.name) / "prometheus.yml"
        known = {name: process.announcement for name, process in self.processes.items()}
        path.write_text(
            scrape_config({name: where for name, where in known.items() if where is not None})
        )
        return path

    async def __aenter__(self) -> Self:
        try:
            await self._or_first_failure(self._start())
        except BaseException:
            self._is_quiet = True  # report the failure, not how the other processes stop
            await self.stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def wait_serving(self, *, timeout_s: float) -> None:
        """Wait until every router and every pool serves, at start or after a failure.

        Raises:
            UnavailableError: not all serve after `timeout_s`; the message names those.
        """
        deadline = Deadline.after(LoopClock(), timeout_s)
        for process in self.processes.values():
            if process.spec.leads:
                remaining_s = max(deadline.remaining_s(), 0.1)
                await until_cluster_serves(process, self._config.security, timeout_s=remaining_s)

    async def restart(self, *names: str, timeout_s: float) -> None:
        """Restart these worker processes together; wait until every pool serves and the router
        knows.

        Raises:
            UnavailableError: not all serve after `timeout_s`; the message names those.
        """
        deadline = Deadline.after(LoopClock(), timeout_s)
        async with AsyncBatonClient(
            self.address, security=self._config.security.to(PeerRole.ROUTER)
        ) as client:
            before = {worker.incarnation for worker in (await client.cluster_status()).workers}
            await asyncio.gather(
                *(self.processes[name].restart(grace_s=timeout_s) for name in names)
            )
            await self.wait_serving(timeout_s=deadline.remaining_s())
            led = sum(self.processes[name].spec.leads for name in names)
            while reasons := _not_back((await client.cluster_status()).workers, before, led):
                if deadline.is_over:
                    raise UnavailableError(
                        f"the router does not see all workers serving after {timeout_s:g} s: {'; '.join(reasons)}"
                    )
                await asyncio.sleep(_POLL_S)

    async def wait_ended(self) -> None:
        """Restart processes that die, until cancelled; raise the error of a failed watcher.

        Cancelling it does not cancel the watchers. `stop` ends them: each watcher ends with its
        process and then closes the resources of that process.
        """
        try:
            await asyncio.gather(*map(asyncio.shield, self._lives.values()))
        except asyncio.CancelledError:
            self._is_quiet = True
            raise

    async def stop(self) -> None:
        """Stop the routers first, so that requests can end, then the workers.

        No process is left after this call.
        """
        try:
            routers = [
                process for process in self.processes.values() if process.spec.role == "router"
            ]
            for group in (routers, [p for p in self.processes.values() if p not in routers]):
                await asyncio.gather(
                    *(process.stop(grace_s=self._config.stop_grace_s) for process in group)
                )
        except (
            asyncio.CancelledError
        ):  # all at once, so that no watcher waits for a fork that is still to come
            if self._link is not None:
                self._link.close()
            raise
        finally:
            for process in self.processes.values():
                process.end()
            if self._lives:
                await asyncio.wait(
                    self._lives.values(), timeout=_REAP_S
                )  # the watchers end with their processes
            for life in self._lives.values():
                life.cancel()
            await asyncio.gather(*self._lives.values(), return_exceptions=True)
            if self._link is not None:
                self._link.close()
            if self._fork_server is not None:
                self._fork_server.close()
            self._folder.cleanup()

    async def _start(self) -> None:
        if self._config.forks_workers and self._config.fork_server is None:
            self._fork_server = ForkServer()
        # make the tokenizer once for all routers
        await asyncio.to_thread(make_tokenizer, self._config.model)
        if self._config.http and find_tokenizer(self._config.model) is None:
            raise ConfigError(
                f"--http needs a tokenizer: {self._config.model} has none", field="http"
            )
        self._say(f"starting {self._plan.num_processes} processes with {self._config.model}")
        await self._connect_fork_server()
        folder = Path(self._folder.name)
        for spec in self._plan.workers(folder):
            self._launch(spec, spawn if self._link is None else self._fork)
        for spec in self._plan.routers(folder):
            self._launch(spec, spawn)
        for process in self.processes.values():
            await process.announced(timeout_s=self._config.ready_timeout_s)
        self._say("waiting for the pools to form and warm up")
        await self.wait_serving(timeout_s=self._config.ready_timeout_s)
        if self._config.http:
            self._launch(self._plan.gateway(folder, routers=self.addresses), spawn)
            await self.processes[GATEWAY].announced(timeout_s=self._config.ready_timeout_s)
            await self.wait_serving(timeout_s=self._config.ready_timeout_s)
        for process in self.processes.values():
            process.settle()

    async def _or_first_failure(self, start: Coroutine[None, None, None]) -> None:
        """Run `start`, but raise a process's error as soon as the process cannot start."""
        starting = asyncio.create_task(start)
        reporting = asyncio.create_task(self._report_progress())
        try:
            while not starting.done():
                await asyncio.wait(
                    {starting, *self._lives.values()},
                    return_when=asyncio.FIRST_COMPLETED,
                    timeout=0.2,
                )
                for life in self._lives.values():
                    if life.done():
                        life.result()
            await starting
        finally:
            starting.cancel()
            reporting.cancel()
            await asyncio.gather(starting, reporting, return_exceptions=True)

    async def _report_progress(self) -> None:
        """Report how far each process is, and what it is waiting for, until cancelled."""
        began_s = asyncio.get_running_loop().time()
        while True:
            await asyncio.sleep(max(PROGRESS_S, _POLL_S))
            processes = list(self.processes.values())
            states = await asyncio.gather(*map(self._state, processes))
            if processes:
                self._say(
                    f"after {asyncio.get_running_loop().time() - began_s:.0f} s: {', '.join(states)}"
                )

    async def _state(self, process: RoleProcess) -> str:
        reason = "" if process.has_served else await reason_of(process, self._config.security)
        return f"{process.spec.name} {process.progress}" + (f" ({reason})" if reason else "")

    def _launch(self, spec: ProcessSpec, start: Spawn) -> None:
        process = RoleProcess(
            spec,
            self._show,
            partial(self._until_serving, spec),
            self._placed(spec.name, start),
            log_style=self._config.own_style,
        )
        self.processes[spec.name], self._lives[spec.name] = (
            process,
            asyncio.create_task(process.run()),
        )

    def _placed(self, name: str, start: Spawn) -> Spawn:
        async def placed(
            module: str, arguments: Sequence[str], *, core: str, environment: Mapping[str, str]
        ) -> Child:
            module, arguments = self._config.places.program(name, module, arguments)
            return await start(module, arguments, core=core, environment=environment)

        return placed

    async def _connect_fork_server(self) -> None:
        fork_server = self._config.fork_server or self._fork_server
        if fork_server is not None and self._config.forks_workers:
            self._link = await fork_server.connect()

    async def _fork(
        self, module: str, arguments: Sequence[str], *, core: str, environment: Mapping[str, str]
    ) -> Child:
        assert self._link is not None
        try:
            return await self._link.spawn(module, arguments, core=core, environment=environment)
        except UnavailableError as error:
            self._say(f"a worker restarts by itself: {error}")
            return await spawn(module, arguments, core=core, environment=environment)

    async def _until_serving(self, spec: ProcessSpec, announcement: Announcement) -> None:
        await until_serving(
            spec, announcement, self._config.security, timeout_s=self._config.ready_timeout_s
        )

    def _say(self, text: str) -> None:
        self._show(_NARRATOR, styled_line(self._config.own_style, text, role=_NARRATOR))

    def _show(self, name: str, line: str) -> None:
        if not self._is_quiet:
            self._sink(name, line)


def _not_back(workers: Sequence[WorkerStatus], before: set[str], num_fresh: int) -> list[str]:
    """Return the reasons why the router cannot use all workers yet.

    `num_fresh` workers must be incarnations that are not in `before`.
    """
    reasons = [
        f"{worker.role} {worker.address}: {worker.reason or 'does not serve'}"
        for worker in workers
        if not worker.serving
    ]
    missing = num_fresh - sum(worker.incarnation not in before for worker in workers)
    return reasons + (
        [f"{missing} restarted processes are not known to it yet"] if missing > 0 else []
    )
