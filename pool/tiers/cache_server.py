"""A tier on a server that speaks the Redis protocol (Redis, Valkey and others).

    baton:SPACE:4f1c…   a hash for each block: the label of each object, and its bytes

`SPACE` is derived from the key that seals the objects, so pools with other keys do not see them. The
server bounds the memory, by `maxmemory` and a policy that evicts. A block that is not used expires.
"""

import logging
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import parse_qsl, urlsplit

import numpy as np
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from pool.tiers.block_store import Content, ObjectKey, StagePart, parts_among
from pool.tiers.memory_store import copy_into, joined
from runtime.errors import ConfigError
from transfer.transport.authenticator import derived

logger = logging.getLogger(__name__)

T = TypeVar("T")

CONNECT_S = 1.0
SILENT_S = 2.0  # seconds without a byte after which the server counts as absent
AVOID_S = 10.0  # seconds for which a server that failed is not asked
LOOK_S = 60.0  # seconds between two looks at the memory that it uses
LOOKED_UP = 64  # blocks that are asked for together
READ_BYTES = 1 << 20  # of one system call
_SPACE_BYTES = 8
_SCHEMES = ("redis", "rediss", "unix")
_DATABASE = re.compile(r"/?\d*")
_OPTIONS = frozenset({"db", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile"})


def check_url(url: str) -> None:
    """Check the address of a server.

    Raises:
        ConfigError: it is not of the form `redis://HOST:PORT`, or has an unknown option or a file that
            is missing.
    """
    options: dict[str, str] = {}
    try:
        parts = urlsplit(url)
        is_file = parts.scheme == "unix"
        is_usable = parts.scheme in _SCHEMES and (
            is_file
            or (bool(parts.hostname) and parts.port != 0 and bool(_DATABASE.fullmatch(parts.path)))
        )
        options = dict(parse_qsl(parts.query))
    except ValueError:
        is_usable = False
    if not is_usable:
        # It is not repeated, because it may contain a password.
        raise ConfigError(
            "cache_server is not redis://HOST:PORT, rediss://HOST:PORT or unix:///PATH",
            field="cache_server",
        )
    if unknown := options.keys() - _OPTIONS:
        raise ConfigError(
            f"cache_server has the options {', '.join(sorted(unknown))}; known are "
            f"{', '.join(sorted(_OPTIONS))}",
            field="cache_server",
        )
    for name, value in options.items():
        if name != "db" and not Path(value).is_file():
            raise ConfigError(f"cache_server: {name} {value} is no file", field="cache_server")


class CacheServer:
    """Objects on a server. Implements `BlockStore`."""

    def __init__(self, url: str, key: bytes, *, expire_s: int) -> None:
        """Create the client of a server, which need not be there yet.

        The names of the objects depend on `key`. Blocks expire that are not used for `expire_s`.

        Raises:
            ConfigError: as `check_url` does.
        """
        check_url(url)
        self._client = redis.Redis.from_url(
            url,
            socket_connect_timeout=CONNECT_S,
            socket_timeout=SILENT_S,
            socket_read_size=READ_BYTES,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
        self._space = f"baton:{derived(key, 'baton space', num_bytes=_SPACE_BYTES).hex()}:"
        self._expire_s = expire_s
        self._where = urlsplit(url)._replace(query="").geturl().rpartition("@")[2]
        self._lock = threading.Lock()
        self._avoided: dict[str, float] = {}  # what failed, until this time
        self._failing: set[str] = set()  # what failed the last time
        self._looked_s = 0.0
        self.num_bytes = 0
        self.max_bytes = 0

    def check(self) -> None:
        """Look how much memory the server has, and warn if it cannot bound itself."""
        self._looked_s = time.monotonic()
        found = self._ask("looked at", self._memory, None)
        if found is None:
            return
        before = self.max_bytes
        self.num_bytes, self.max_bytes, policy = found
        if before:
            return
        logger.info("blocks are also kept at the cache server %s", self._where)
        if not self.max_bytes or policy == "noeviction":
            logger.warning(
                "the cache server %s has maxmemory %d and the policy %s: set a limit and "
                "allkeys-lru, else it refuses blocks or exhausts its machine",
                self._where,
                self.max_bytes,
                policy or "unknown",
            )

    def parts(self, blocks: Sequence[bytes], content: Content) -> Iterator[Collection[StagePart]]:
        for some in _batches(blocks):
            nothing: list[list[bytes]] = [[]] * len(some)
            for found in self._ask("asked", partial(self._labels, some), nothing):
                yield parts_among((label.decode(errors="replace") for label in found), content)

    def get(self, key: ObjectKey, pieces: Sequence[memoryview]) -> int | None:
        return self._ask("read", lambda: self._read(key, pieces), None)

    def put(self, key: ObjectKey, pieces: Sequence[memoryview]) -> bool:
        if time.monotonic() - self._looked_s > LOOK_S:
            self.check()
        return self._ask("written", lambda: self._write(key, pieces), default=False)

    def prefetch(self, key: ObjectKey) -> None:
        """Do nothing: the server answers at once."""

    def use(self, keys: Iterable[ObjectKey]) -> None:
        for some in _batches(list(dict.fromkeys(key.block for key in keys))):
            self._ask("used", partial(self._touch, some), None)

    def remove(self, key: ObjectKey) -> None:
        self._ask("removed", lambda: self._client.hdel(self._name(key.block), key.label), 0)

    def interrupt(self) -> None:
        """Close all connections, also one on which the server sends a byte from time to time."""
        self._client.connection_pool.disconnect()

    def close(self) -> None:
        self._client.close()

    def _name(self, block: bytes) -> str:
        return self._space + block.hex()

    def _memory(self) -> tuple[int, int, str]:
        """Return how many bytes are used, how many may be (0: any number), and the policy then."""
        found = self._client.info("memory")
        try:
            sizes = int(found["used_memory"]), int(found["maxmemory"])
        except (KeyError, TypeError, ValueError) as error:
            raise redis.InvalidResponse(f"no sizes in INFO: {error!r}") from error
        return *sizes, str(found.get("maxmemory_policy", ""))

    def _labels(self, blocks: Sequence[bytes]) -> list[list[bytes]]:
        asked = self._client.pipeline(transaction=False)
        for block in blocks:
            asked.hkeys(self._name(block))
        found: list[object] = asked.execute()
        return [_names(labels) for labels in found]

    def _touch(self, blocks: Sequence[bytes]) -> None:
        asked = self._client.pipeline(transaction=False)
        for block in blocks:
            asked.expire(self._name(block), self._expire_s)
        asked.execute()

    def _read(self, key: ObjectKey, pieces: Sequence[memoryview]) -> int | None:
        name = self._name(key.block)
        size = self._client.hstrlen(name, key.label)
        if not isinstance(size, int):
            raise redis.InvalidResponse("HSTRLEN returned no number")
        if size != sum(map(len, pieces)):
            return size or None  # a larger one is not even asked for
        content = self._client.hget(name, key.label)
        if not isinstance(content, bytes):
            return None  # it went meanwhile
        if len(content) == size:
            copy_into(pieces, np.frombuffer(content, np.uint8))
        return len(content)

    def _write(self, key: ObjectKey, pieces: Sequence[memoryview]) -> bool:
        name = self._name(key.block)
        asked = self._client.pipeline(transaction=False)
        asked.hset(name, key.label, memoryview(joined(pieces)))  # type: ignore[arg-type]
        asked.expire(name, self._expire_s)
        asked.execute()
        return True

    def _ask(self, what: str, call: Callable[[], T], default: T) -> T:
        """Return what the call does, or `default` if the server fails or has failed lately."""
        kind = "write" if what == "written" else "read"
        with self._lock:
            if time.monotonic() < self._avoided.get(kind, 0.0):
                return default
        try:
            found = call()
        except (redis.RedisError, OSError) as error:
            self._failed(kind, what, error)
            return default
        if kind in self._failing:
            self._failing.discard(kind)
            logger.info("the cache server %s can be %s again", self._where, what)
        return found

    def _failed(self, kind: str, what: str, error: Exception) -> None:
        """Leave the server alone for a while, and say so when it begins to fail."""
        with self._lock:
            self._avoided[kind] = time.monotonic() + AVOID_S
            is_new = kind not in self._failing
            self._failing.add(kind)
        logger.log(
            logging.WARNING if is_new else logging.DEBUG,
            "the cache server %s cannot be %s, and is left alone for %g s: %s",
            self._where,
            what,
            AVOID_S,
            error,
        )


def _batches(blocks: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    for start in range(0, len(blocks), LOOKED_UP):
        yield blocks[start : start + LOOKED_UP]


def _names(reply: object) -> list[bytes]:
    if not isinstance(reply, list) or not all(isinstance(name, bytes) for name in reply):
        raise redis.InvalidResponse("HKEYS returned no names")
    return reply
