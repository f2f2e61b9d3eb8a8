"""A gateway in a process of its own."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from baton.fork_server import spawn
from baton.gateway import wait_ready
from runtime.process.announce import read_announcement
from runtime.process.child_process import ALL_CORES


@asynccontextmanager
async def gateway(routers: str | Sequence[str], folder: Path, *flags: str) -> AsyncIterator[str]:
    """Run a gateway in front of these routers; yield its address."""
    announce = folder / "gateway.json"
    routers = [routers] if isinstance(routers, str) else routers
    arguments = (
        *(part for router in routers for part in ("--router", router)),
        "--listen",
        "127.0.0.1:0",
        "--announce",
        str(announce),
        "--drain-s",
        "1",
        *flags,
    )
    child = await spawn("baton.gateway", arguments, core=ALL_CORES, environment=os.environ)
    try:
        async with asyncio.timeout(60):
            while (where := read_announcement(announce)) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await wait_ready(where.address, timeout_s=60)
        yield where.address
        os.kill(child.pid, signal.SIGTERM)
        assert await asyncio.wait_for(child.wait(), 60) == 0
    finally:
        if child.returncode is None:
            os.kill(child.pid, signal.SIGKILL)
            await child.wait()
