"""The leaders of a cluster's pools, called directly."""

from pathlib import Path

from protos import worker_pb2, worker_pb2_grpc
from runtime.process.announce import read_announcement
from runtime.rpc.client import open_channel


def leader_address(announced: Path) -> str:
    """Return the address of a leader from the file in which it announces itself."""
    announcement = read_announcement(announced)
    assert announcement is not None
    return announcement.address


async def flush(announced: Path) -> None:
    """Empty the prefix cache of a pool whose leader announces itself in this file."""
    await flush_at(leader_address(announced))


async def flush_at(address: str) -> None:
    """Empty the prefix cache of a pool with its leader at this address."""
    async with open_channel(address) as channel:
        await worker_pb2_grpc.WorkerStub(channel).FlushCache(worker_pb2.FlushCacheRequest())
