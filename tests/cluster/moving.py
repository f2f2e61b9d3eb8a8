"""`python -m tests.cluster.moving`: processes that know each other by DNS names, and move to other
addresses in turn.

In a network of its own, where a name server of the test's answers all processes. Each that moves is
killed, its name has no address until its successor listens elsewhere, and from then on seconds
count until those that know the name have found it. Prints them as JSON. Ends with 77 where
namespaces are refused.
"""

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from baton.client import AsyncBatonClient, BatonClient
from baton.cluster_config import demo_model
from baton.retry import NO_RETRY
from baton.values import Query, Sampling, Stop
from runtime.errors import BatonError, ConfigError
from runtime.process.announce import announced_address
from runtime.rpc.client import open_channel, wait_serving
from tests.support.network.names import NAME_SERVER, NameServer, become_named

MODULE, REFUSED = "tests.cluster.moving", 77
PORT = 7000
QUERY = Query(tuple(range(5, 40)), Sampling(temperature=0), Stop(max_tokens=4))
START_S, FOUND_S = 120.0, 60.0


class Roles:
    """Processes by name, each at its own address, all of the same model."""

    def __init__(self, names: NameServer, folder: Path) -> None:
        self._names = names
        self._folder = folder
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._num_starts = 0

    async def start(self, name: str, role: str, host: str, *flags: str) -> None:
        """Start it at PORT of `host`, point its name there, and return once it listens."""
        self._num_starts += 1
        announced = self._folder / f"{self._num_starts}.json"
        own = (
            "--model",
            str(demo_model()),
            "--listen",
            f"{host}:{PORT}",
            "--announce",
            str(announced),
            "--log-level",
            "warning",
        )
        self._processes[name] = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            role,
            *own,
            *flags,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=sys.stderr.fileno(),
        )
        async with asyncio.timeout(START_S):
            await announced_address(announced)
        self._names.answers[name] = [host]

    async def kill(self, name: str) -> None:
        """Kill it and remove the address of its name."""
        self._names.answers[name] = []
        self._processes[name].kill()
        await self._processes[name].wait()

    async def end(self) -> None:
        for process in self._processes.values():
            if process.returncode is None:
                process.kill()
                await process.wait()


@asynccontextmanager
async def started_roles(names: NameServer) -> AsyncIterator[Roles]:
    with tempfile.TemporaryDirectory() as folder:
        roles = Roles(names, Path(folder))
        try:
            yield roles
        finally:
            await roles.end()


def worker(*flags: str) -> tuple[str, ...]:
    return ("--memory-mb", "64", "--metrics-port", "0", *flags)


async def seconds_until(holds: Callable[[], Awaitable[bool]]) -> float:
    began_s = time.monotonic()
    async with asyncio.timeout(FOUND_S):
        while not await holds():  # noqa: ASYNC110 (what another process does)
            await asyncio.sleep(0.05)
    return round(time.monotonic() - began_s, 2)


async def answers(client: AsyncBatonClient) -> bool:
    """Return whether the client's own router serves with workers of both roles."""
    try:
        await client.complete(QUERY, timeout_s=2)
    except BatonError:
        return False
    return True


def answers_now(client: BatonClient) -> bool:
    try:
        return bool(client.model_info().model)
    except BatonError:
        return False


async def measure(names: NameServer) -> dict[str, float]:
    found: dict[str, float] = {}
    async with started_roles(names) as roles:
        leader = worker("--rank", "0", "--world-size", "2")
        follower = worker("--rank", "1", "--world-size", "2", "--leader", f"decode.test:{PORT}")
        await asyncio.gather(
            roles.start("decode.test", "decode", "127.0.0.2", *leader),
            roles.start("stage.test", "decode", "127.0.0.4", *follower),
            roles.start("prefill.test", "prefill", "127.0.0.5", *worker()),
        )
        by_name = ("--prefill", f"prefill.test:{PORT}", "--decode", f"decode.test:{PORT}")
        by_dns = (
            "--prefill",
            f"dns:///prefill.test:{PORT}",
            "--decode",
            f"dns:///decode.test:{PORT}",
        )
        await roles.start("router.test", "router", "127.0.0.8", *by_name)
        await roles.start("other.test", "router", "127.0.0.9", *by_dns)
        async with (
            AsyncBatonClient(f"127.0.0.8:{PORT}", retry=NO_RETRY) as named,
            AsyncBatonClient(f"127.0.0.9:{PORT}", retry=NO_RETRY) as discovered,
        ):
            for client in (named, discovered):
                await seconds_until(lambda client=client: answers(client))  # type: ignore[misc]

            await roles.kill("decode.test")
            await roles.start("decode.test", "decode", "127.0.0.3", *leader)
            found |= dict(
                zip(
                    ("stage", "decode by name", "decode by DNS"),
                    await asyncio.gather(
                        joined(),
                        seconds_until(lambda: answers(named)),
                        seconds_until(lambda: answers(discovered)),
                    ),
                    strict=True,
                )
            )

            await roles.kill("prefill.test")
            await roles.start("prefill.test", "prefill", "127.0.0.6", *worker())
            found |= dict(
                zip(
                    ("prefill by name", "prefill by DNS"),
                    await asyncio.gather(
                        seconds_until(lambda: answers(named)),
                        seconds_until(lambda: answers(discovered)),
                    ),
                    strict=True,
                )
            )

        with BatonClient(f"router.test:{PORT}", retry=NO_RETRY) as blocking:
            async with AsyncBatonClient(f"router.test:{PORT}", retry=NO_RETRY) as client:

                async def answers_blocking() -> bool:
                    return await asyncio.to_thread(answers_now, blocking)

                assert await answers(client)
                assert await answers_blocking()
                await roles.kill("router.test")
                assert not await answers(client)
                assert not await answers_blocking()
                await roles.start("router.test", "router", "127.0.0.7", *by_name)
                found |= dict(
                    zip(
                        ("client", "client of threads"),
                        await asyncio.gather(
                            seconds_until(lambda: answers(client)), seconds_until(answers_blocking)
                        ),
                        strict=True,
                    )
                )
    return found


async def joined() -> float:
    """Return the seconds until the leader's second stage has joined."""
    began_s = time.monotonic()
    async with open_channel(f"127.0.0.4:{PORT}") as channel:
        await wait_serving(channel, "baton.v1.Pipeline", timeout_s=FOUND_S)
    return round(time.monotonic() - began_s, 2)


def main() -> int:
    try:
        become_named(MODULE)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return REFUSED
    with NameServer(*NAME_SERVER) as names:
        print(json.dumps(asyncio.run(measure(names))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
