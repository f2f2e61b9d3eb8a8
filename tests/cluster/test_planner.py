"""The planner over real routers and workers: what it reads, what it switches, and its process."""

import asyncio
import re
import sys
from pathlib import Path

from prometheus_client import CollectorRegistry

from baton.load import Slo
from planner.fleet_view import BOTH, DECODE, ONLY_DECODE, ONLY_PREFILL, PREFILL, FleetView
from planner.planner import RolePlan, RolePlanner
from planner.routers import RouterClients
from planner.service import PlannerService
from runtime.clock import SystemClock
from runtime.observe.metrics.planner import PlannerMetrics
from runtime.security.access import PLAIN_CHANNEL
from tests.support.cluster.clusters import RunningCluster, running_cluster
from tests.support.cluster.questions import Shown, as_query, make_questions, shown


class ByHand(RolePlanner):
    """A planner that notes what it sees, and switches what a test says."""

    def __init__(self) -> None:
        super().__init__(Slo(2.0, 0.05))
        self.views: list[FleetView] = []
        self.next: dict[str, frozenset[str]] = {}

    def plan(self, view: FleetView) -> RolePlan:
        self.views.append(view)
        plan = RolePlan(self.next, super().plan(view).saturation, {DECODE: 1.5})
        self.next = {}
        return plan


def service_of(
    running: RunningCluster, planner: RolePlanner, *, acts: bool
) -> tuple[PlannerService, CollectorRegistry]:
    registry = CollectorRegistry()
    metrics = PlannerMetrics.create(registry)
    routers = RouterClients((running.cluster.address,), PLAIN_CHANNEL)
    return (
        PlannerService(routers, planner, metrics, PLAIN_CHANNEL, SystemClock(), acts=acts),
        registry,
    )


QUESTION = make_questions(1)[0]
REPORTED_S = 0.6  # after which routers have a report of what happened before


async def ask(running: RunningCluster) -> Shown:
    return shown(await running.client.complete(as_query(QUESTION), timeout_s=60))


async def until_active(
    running: RunningCluster,
    planner: ByHand,
    service: PlannerService,
    wanted: dict[str, frozenset[str]],
) -> FleetView:
    """Step until the routers show these roles."""
    async with asyncio.timeout(20):
        while True:
            await service.step()
            view = planner.views[-1]
            if {each.address: each.active for each in view.workers} == wanted:
                return view
            await asyncio.sleep(0.1)


async def test_a_planner_reads_routers_and_switches_workers(checkpoint: Path) -> None:
    async with running_cluster(checkpoint, prefill=0, decode=0, worker=2) as running:
        planner = ByHand()
        service, registry = service_of(running, planner, acts=True)
        expected = await ask(running)
        await asyncio.sleep(REPORTED_S)
        await service.step()
        view = planner.views[-1]
        first, second = (worker.address for worker in view.workers)
        assert {worker.able for worker in view.workers} == {BOTH}
        assert {worker.active for worker in view.workers} == {BOTH}
        assert sum(worker.num_prompt_tokens for worker in view.workers) >= len(
            QUESTION.prompt_token_ids
        )
        assert view.num_present == 0

        planner.next = {first: ONLY_PREFILL, second: ONLY_DECODE}
        roles = {first: ONLY_PREFILL, second: ONLY_DECODE}
        view = await until_active(running, planner, service, roles)
        assert all(worker.is_serving for worker in view.workers)
        assert await ask(running) == expected
        await service.step()
        assert planner.views[-1].num_arrived == 1

        planner.next = {first: ONLY_DECODE, second: ONLY_PREFILL}
        roles = {first: ONLY_DECODE, second: ONLY_PREFILL}
        await until_active(running, planner, service, roles)
        assert await ask(running) == expected
        assert registry.get_sample_value("baton_role_switches_total", {"outcome": "switched"}) == 4
        tail = running.log_tail()
        assert "not ready" not in tail, "a role was not served"
        planner.next = {first: BOTH, second: BOTH}
        await until_active(running, planner, service, {first: BOTH, second: BOTH})
        await running.until_clean()


async def test_a_dry_run_and_a_lost_worker_switch_nothing(checkpoint: Path) -> None:
    async with running_cluster(checkpoint, prefill=0, decode=0, worker=1) as running:
        planner = ByHand()
        dry, registry = service_of(running, planner, acts=False)
        await dry.step()
        (worker,) = planner.views[-1].workers
        planner.next = {worker.address: ONLY_PREFILL}
        await dry.step()
        await asyncio.sleep(REPORTED_S)
        await dry.step()
        assert planner.views[-1].workers[0].active == BOTH
        assert registry.get_sample_value("baton_role_switches_total", {"outcome": "planned"}) == 1

        assert registry.get_sample_value("baton_wanted_workers", {"role": DECODE}) == 1.5
        assert registry.get_sample_value("baton_wanted_workers", {"role": PREFILL}) is None
        acting, registry = service_of(running, planner, acts=True)
        planner.next = {"127.0.0.1:1": ONLY_PREFILL}
        await acting.step()
        assert registry.get_sample_value("baton_role_switches_total", {"outcome": "failed"}) == 1


async def test_the_process_exports_the_saturation(checkpoint: Path) -> None:
    async with running_cluster(checkpoint, prefill=0, decode=0, worker=2) as running:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "planner",
            "--router",
            running.cluster.address,
            "--metrics-port",
            "0",
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        try:
            async with asyncio.timeout(30):
                port = None
                while port is None:
                    line = (await process.stderr.readline()).decode()
                    assert line, "the planner ended"
                    found = re.search(r"port=(\d+)", line)
                    port = None if found is None else int(found[1])
                await ask(running)
                await asyncio.sleep(2.5)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
            text = (await asyncio.wait_for(reader.read(), 10)).decode()
            writer.close()
            assert 'baton_saturation_ratio{role="prefill"}' in text
            assert 'baton_saturation_ratio{role="decode"}' in text
            read = re.search(r'baton_planner_readings_total\{outcome="read"\} (\S+)', text)
            assert read is not None
            assert float(read[1]) >= 2
        finally:
            process.terminate()
            assert await asyncio.wait_for(process.wait(), 10) == 0
