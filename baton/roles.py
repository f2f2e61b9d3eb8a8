"""The switch of a worker's roles, asked of the worker itself."""

from collections.abc import Sequence

import grpc

from protos import worker_pb2, worker_pb2_grpc
from runtime.config import parse_peer
from runtime.errors import UnavailableError
from runtime.rpc.client import open_channel
from runtime.rpc.status import error_from_rpc
from runtime.security.access import ChannelSecurity, PeerRole

TIMEOUT_S = 10.0


async def set_roles(
    worker: str, roles: Sequence[str], security: ChannelSecurity
) -> tuple[str, ...]:
    """Make a worker serve these roles; return those that it serves then.

    Raises:
        BatonError: it cannot be reached, or cannot serve them.
    """
    parse_peer(worker, field="WORKER")
    async with open_channel(worker, security=security.to(PeerRole.PREFILL)) as channel:
        try:
            epoch = 1 + await _epoch(channel)
            answer = await worker_pb2_grpc.WorkerStub(channel).SetRoles(
                worker_pb2.SetRolesRequest(epoch=epoch, roles=roles), timeout=TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
    return tuple(answer.roles)


async def _epoch(channel: grpc.aio.Channel) -> int:
    """Return the epoch of the latest switch."""
    watch = worker_pb2_grpc.WorkerStub(channel).Watch(
        worker_pb2.WatchRequest(interval_s=TIMEOUT_S), timeout=TIMEOUT_S
    )
    try:
        async for response in watch:
            if response.HasField("load"):
                return response.load.roles_epoch
    finally:
        watch.cancel()
    raise UnavailableError("it ended its reports")
