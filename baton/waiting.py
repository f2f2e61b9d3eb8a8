"""Whether processes of a local cluster serve, and what the others are waiting for.

The processes themselves report this: by health, by a leader's own reports, and by a router's view
of its workers.
"""

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.client import AsyncBatonClient
from baton.gateway import wait_ready
from baton.process import ProcessSpec, RoleProcess
from baton.values import WorkerStatus
from protos import worker_pb2, worker_pb2_grpc
from runtime.errors import BatonError, UnavailableError
from runtime.process.announce import Announcement, read_announcement
from runtime.rpc.client import open_channel, wait_serving
from runtime.rpc.status import is_lost
from runtime.rpc.unreachable import reach_problem
from runtime.security.access import ChannelSecurity, PeerRole

GATEWAY_MODULE = "baton.gateway"
ASK_S = 2.0  # for a process to report what it is waiting for
_SERVICES = {
    "router": "baton.v1.Generation",
    "prefill": "baton.v1.Prefill",
    "decode": "baton.v1.Decode",
    "worker": "baton.v1.Worker",  # whatever its present roles are
}
ROLES = {"prefill", "decode"}
_FOLLOWER_SERVICE = "baton.v1.Pipeline"
_LOOK_S = 2.0  # between two looks at the workers of a router that does not serve
_MAX_REASON = 240  # characters
_SERVING = health_pb2.HealthCheckResponse.SERVING


async def until_serving(
    spec: ProcessSpec, announcement: Announcement, security: ChannelSecurity, *, timeout_s: float
) -> None:
    """Return when the process serves; a stage that does not lead serves once it has joined.

    Raises:
        UnavailableError: it does not serve after `timeout_s`.
    """
    if spec.role == GATEWAY_MODULE:
        await wait_ready(announcement.address, timeout_s=timeout_s)
        return
    async with open_channel(
        announcement.address, security=security.to(_peer_role(spec))
    ) as channel:
        await wait_serving(channel, _service_of(spec), timeout_s=timeout_s)


async def until_cluster_serves(
    process: RoleProcess, security: ChannelSecurity, *, timeout_s: float
) -> None:
    """Return when a leader or a router serves.

    Raises:
        UnavailableError: it does not serve after `timeout_s`, or the workers of a router are
            incompatible; says what it is waiting for.
    """
    announcement = process.announcement
    assert announcement is not None
    serving = until_serving(process.spec, announcement, security, timeout_s=timeout_s)
    try:
        if process.spec.role == "router":
            await _unless_unpaired(serving, announcement.address, security.to(PeerRole.ROUTER))
        else:
            await serving
    except UnavailableError as error:
        reason = await reason_of(process, security)
        raise UnavailableError(
            "; ".join(filter(None, (f"{process.spec.name}: {error}", reason)))
        ) from None


async def reason_of(process: RoleProcess, security: ChannelSecurity) -> str:
    """Return what a listening process is waiting for, or why it cannot be asked.

    Empty if it serves, does not listen yet or does not report a reason.
    """
    spec = process.spec
    announcement = process.announcement or read_announcement(spec.announce)
    if announcement is None or spec.role == GATEWAY_MODULE:
        return ""
    security = security.to(_peer_role(spec))
    try:
        async with (
            asyncio.timeout(ASK_S),
            open_channel(announcement.address, security=security) as channel,
        ):
            answer = await health_pb2_grpc.HealthStub(channel).Check(  # type: ignore[attr-defined]  # stubs lack it
                health_pb2.HealthCheckRequest(service=_service_of(spec))
            )
            if answer.status == _SERVING:
                return ""
            if spec.role == "router":
                return _cut("; ".join(_problems(await _workers(announcement.address, security))))
            return _cut(await _leader_s_reason(channel)) if spec.leads else ""
    except grpc.aio.AioRpcError as error:
        return _cut(f"cannot be asked: {reach_problem(error.details())}") if is_lost(error) else ""
    except TimeoutError:
        return "does not respond"


async def _leader_s_reason(channel: grpc.aio.Channel) -> str:
    """Return the reason that a leader reports; with TLS, only routers and operators may ask."""
    async for response in worker_pb2_grpc.WorkerStub(channel).Watch(
        worker_pb2.WatchRequest(interval_s=ASK_S)
    ):
        if response.HasField("load"):
            return response.load.reason
    return ""


def _peer_role(spec: ProcessSpec) -> PeerRole:
    """Return a role that the certificate of the process names; a worker's names both."""
    return PeerRole.DECODE if spec.role == "worker" else PeerRole(spec.role)


def _service_of(spec: ProcessSpec) -> str:
    return _SERVICES[spec.role] if spec.leads else _FOLLOWER_SERVICE


async def _unless_unpaired(
    serving: Coroutine[None, None, None], router: str, security: ChannelSecurity
) -> None:
    """Wait for `serving`, but fail as soon as the router's workers turn out to be incompatible.

    All workers of a role here have the same settings, which do not change.

    Raises:
        UnavailableError: workers of both roles are usable, and no two are compatible.
    """
    waiting = asyncio.create_task(serving)
    try:
        while not (await asyncio.wait({waiting}, timeout=_LOOK_S))[0]:
            usable = [worker for worker in await _workers(router, security) if worker.serving]
            if {worker.role for worker in usable} == ROLES and all(
                worker.reason for worker in usable
            ):
                raise UnavailableError("its workers serve, but are incompatible")
        await waiting
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def _workers(router: str, security: ChannelSecurity) -> Sequence[WorkerStatus]:
    """Return the workers as the router sees them, or none if it does not respond."""
    with contextlib.suppress(BatonError):
        async with AsyncBatonClient(router, security=security) as client:
            return (await client.cluster_status()).workers
    return ()


def _problems(workers: Sequence[WorkerStatus]) -> list[str]:
    """Return the reasons of the workers that the router cannot use."""
    return [
        f"{worker.role} {worker.address}: {worker.reason}" for worker in workers if worker.reason
    ]


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_REASON else text[:_MAX_REASON] + "..."
