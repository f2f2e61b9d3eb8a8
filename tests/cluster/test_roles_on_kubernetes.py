"""Workers of both roles as the aggregated overlay deploys them: one service that routers read for both
roles, TLS between processes, tokens for clients, and a planner with the token of an operator."""

import asyncio
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from prometheus_client import CollectorRegistry

from baton.client import AsyncBatonClient
from planner.fleet_view import BOTH, ONLY_DECODE, ONLY_PREFILL
from planner.routers import RouterClients
from planner.service import PlannerService
from runtime.clock import SystemClock
from runtime.observe.metrics.planner import PlannerMetrics
from runtime.process.announce import read_announcement
from runtime.security.access import ChannelSecurity, PeerRole
from runtime.security.tokens import OwnToken
from tests.cluster.test_planner import ByHand
from tests.cluster.test_security import QUERY, settings
from tests.router.harness import eventually
from tests.support.cluster.clusters import running_cluster
from tests.support.network.authority import Authority
from tests.support.router.kube import fake_api

NUM_ROUTERS = 2


async def start_router(
    stack: AsyncExitStack, folder: Path, model: Path, config: Path, api_port: int
) -> str:
    """Run a router that reads the service `worker` for both roles; return its address."""
    announce = folder / "router.json"
    place = "k8s:///worker:grpc"
    arguments = {
        "--config": str(config),
        "--model": str(model),
        "--listen": "127.0.0.1:0",
        "--prefill": place,
        "--decode": place,
        "--kubernetes-api": f"http://127.0.0.1:{api_port}",
        "--service-account": str(folder.parent / "account"),
        "--client-certificates": "none",
        "--operator-tokens": "operator",
        "--announce": str(announce),
    }
    flags = [text for pair in arguments.items() for text in pair]
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "router", *flags)

    async def end() -> None:
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 30) == 0

    stack.push_async_callback(end)
    await eventually(announce.exists, "an announcement", within_s=60)
    announcement = read_announcement(announce)
    assert announcement is not None
    return announcement.address


async def test_a_planner_switches_workers_of_one_service(checkpoint: Path, tmp_path: Path) -> None:
    authority = Authority("one")
    tokens = tmp_path / "tokens"
    tokens.write_text("operator the-token-of-operators\nalice the-token-of-alice\n")
    config = settings(tmp_path, authority, tokens)
    account = tmp_path / "account"
    account.mkdir()
    for name, text in (("token", "secret-1"), ("namespace", "baton"), ("ca.crt", "")):
        (account / name).write_text(text)
    own = {}
    for name in ("operator", "alice"):
        own[name] = tmp_path / f"{name}.token"
        own[name].write_text(f"the-token-of-{name.replace('tor', 'tors')}\n")
    store = authority.store(tmp_path / "operator", "operator")
    operator = ChannelSecurity(store, OwnToken(own["operator"]))
    alice = ChannelSecurity(authority.store(tmp_path / "alice", "alice"), OwnToken(own["alice"]))
    folders = [tmp_path / f"router-{index}" for index in range(NUM_ROUTERS)]
    for folder in folders:
        folder.mkdir()
    flags = ("--config", str(config))
    async with (
        running_cluster(
            checkpoint,
            prefill=0,
            decode=0,
            worker=2,
            worker_flags=flags,
            router_flags=flags,
            security=operator,
            client_security=operator,
        ) as running,
        fake_api() as api,
        AsyncExitStack() as stack,
    ):
        addresses = []
        for index in range(2):
            announcement = running.cluster.processes[f"worker-{index}"].announcement
            assert announcement is not None
            addresses.append(announcement.address)
            api.put_worker(f"worker-{index}", "worker", announcement.address)
        routers = [
            await start_router(stack, folder, checkpoint, config, api.port) for folder in folders
        ]
        client = await stack.enter_async_context(
            AsyncBatonClient(routers[0], security=alice.to(PeerRole.ROUTER))
        )
        expected = (await client.complete(QUERY, timeout_s=60)).token_ids
        named = [worker.address for worker in (await client.cluster_status()).workers]
        assert not set(named) & set(addresses), "addresses are for operators"

        planner = ByHand()
        clients = await stack.enter_async_context(RouterClients(routers, operator))
        metrics = PlannerMetrics.create(CollectorRegistry())
        service = PlannerService(clients, planner, metrics, operator, SystemClock(), acts=True)
        await service.step()
        assert {each.address: each.able for each in planner.views[-1].workers} == dict.fromkeys(
            addresses, BOTH
        )
        first, second = addresses
        planner.next = {first: ONLY_PREFILL, second: ONLY_DECODE}
        await service.step()
        async with asyncio.timeout(20):
            while {each.address: each.active for each in planner.views[-1].workers} != {
                first: ONLY_PREFILL,
                second: ONLY_DECODE,
            }:
                await asyncio.sleep(0.1)
                await service.step()
        for address in routers:
            other = await stack.enter_async_context(
                AsyncBatonClient(address, security=alice.to(PeerRole.ROUTER))
            )
            assert (await other.complete(QUERY, timeout_s=60)).token_ids == expected
