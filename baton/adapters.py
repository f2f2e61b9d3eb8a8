"""The adapters of all workers, as an operator lists, loads and unloads them."""

from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from protos import adapters_pb2 as pb
from protos.adapters_pb2_grpc import AdaptersStub
from runtime.process.host_memory import MIB
from runtime.rpc.client import open_channel
from runtime.rpc.status import error_from_rpc
from runtime.security.access import ChannelSecurity

TIMEOUT_S = 125.0  # workers read the files


@dataclass(frozen=True)
class AdapterOnWorker:
    """An adapter on a worker, or why the worker did not do what it was asked.

    Attributes:
        name: empty if the worker has none, or did not do it.
        digest: of its content, in hex.
        requests: that have it now.
        state: loaded, cold (loaded when a request needs it), retired, or failed.
    """

    role: str
    address: str
    name: str = ""
    digest: str = ""
    num_bytes: int = 0
    requests: int = 0
    state: str = ""
    error: str = ""


async def change_adapters(
    target: str, security: ChannelSecurity, *, load: str = "", unload: str = ""
) -> list[AdapterOnWorker]:
    """Load or unload an adapter on all workers of a router, or else list all adapters.

    Raises:
        BatonError: the router cannot be reached, or refuses.
    """
    async with open_channel(target, security=security) as channel:
        stub = AdaptersStub(channel)
        try:
            if load:
                loaded = await stub.LoadAdapter(pb.LoadAdapterRequest(name=load), timeout=TIMEOUT_S)
                return _rows(loaded.workers)
            if unload:
                unloaded = await stub.UnloadAdapter(
                    pb.UnloadAdapterRequest(name=unload), timeout=TIMEOUT_S
                )
                return _rows(unloaded.workers)
            listed = await stub.ListAdapters(pb.ListAdaptersRequest(), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        return _rows(listed.workers)


def adapter_line(found: AdapterOnWorker) -> str:
    """Return an adapter on a worker as a line of text."""
    worker = f"{found.role} {found.address}"
    if not found.name:
        return f"{worker}: {found.error or 'no adapters'}"
    size = f"{found.num_bytes / MIB:.1f} MiB, {found.requests} requests"
    problem = f": {found.error}" if found.error else ""
    return f"{worker}: {found.name} {found.state}, {found.digest[:12]}, {size}{problem}"


def _rows(workers: Sequence[pb.WorkerAdapters]) -> list[AdapterOnWorker]:
    rows = []
    for worker in workers:
        if worker.error or not worker.adapters:
            rows.append(AdapterOnWorker(worker.role, worker.address, error=worker.error))
        rows += [
            AdapterOnWorker(
                worker.role,
                worker.address,
                each.name,
                each.digest,
                each.num_bytes,
                each.requests,
                _state(each),
                each.problem,
            )
            for each in worker.adapters
        ]
    return rows


def _state(status: pb.AdapterStatus) -> str:
    if status.problem:
        return "failed"
    if status.retired:
        return "retired"
    return "loaded" if status.loaded else "cold"
