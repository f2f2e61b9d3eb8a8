"""The memory for the adapters of a pool: loads, leases, and what leaves to make room."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from models.adapters import Adapter
from protos.adapters_pb2 import AdapterStatus
from runtime.errors import BatonError, CapacityError, ConfigError, UnavailableError
from runtime.observe.metrics.pools import AdapterMetrics
from runtime.process.host_memory import MIB

ROOM_S = 10.0  # seconds that a load waits for the end of requests whose adapter can go
UNUSED_S = 60.0  # seconds for the last steps and transfers of requests that have ended
PAUSE_S = 0.02  # seconds between two looks at them

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class AdapterVersion:
    """One version of an adapter.

    Attributes:
        num_bytes: in memory, on all stages together.
        leases: requests that have it.
        used_s: when the latest one began or ended.
        problem: why it could not be loaded. It is not accepted then.
    """

    adapter: Adapter
    num_bytes: int
    is_retired: bool = False
    leases: int = 0
    used_s: float = 0.0
    problem: str = ""
    loading: asyncio.Task[None] | None = None

    @property
    def key(self) -> str:
        return self.adapter.key

    def status(self, *, is_loaded: bool) -> AdapterStatus:
        return AdapterStatus(
            name=self.adapter.name,
            digest=self.adapter.digest,
            num_bytes=self.num_bytes,
            loaded=is_loaded,
            retired=self.is_retired,
            requests=self.leases,
            problem=self.problem,
        )


@dataclass(frozen=True)
class StagesAdapters:
    """The stages of a pool, as far as adapters concern them.

    Attributes:
        hold: makes all stages hold exactly these adapters. It raises ConfigError if one cannot be
            loaded, and UnavailableError if a stage is lost.
        has_any: returns whether the engine has a request with this adapter, ended or not.
    """

    hold: Callable[[Sequence[str]], Awaitable[None]]
    has_any: Callable[[str], Awaitable[bool]]


class AdapterMemory:
    """The adapters that the stages of a pool have in memory. Belongs to the event loop's thread.

    An adapter without leases leaves memory when another one needs the room, the one that was not
    used for the longest time first. Steps of requests wait for no load.
    """

    def __init__(
        self,
        max_bytes: int,
        stages: StagesAdapters,
        metrics: AdapterMetrics,
        loaded: Iterable[AdapterVersion],
    ) -> None:
        """Create the memory of a pool whose stages have `loaded` some with their layers."""
        self.max_bytes = max_bytes
        self._stages = stages
        self._metrics = metrics
        self._loaded = {version.key: version for version in loaded}
        self._change = asyncio.Lock()
        self._freed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        # Called when others are in memory, or are refused.
        self.changed: Callable[[], object] = lambda: None

    @property
    def keys(self) -> list[str]:
        """Return the keys of the adapters in memory."""
        return list(self._loaded)

    @property
    def num_bytes(self) -> int:
        return sum(version.num_bytes for version in self._loaded.values())

    def holds(self, version: AdapterVersion) -> bool:
        """Return whether a version is in memory, and stays while it is leased."""
        return self._loaded.get(version.key) is version

    def lease(self, version: AdapterVersion, change: int) -> None:
        """Begin (1) or end (-1) the use of a version, in memory or not."""
        version.leases += change
        version.used_s = time.monotonic()
        self._metrics.requests.labels(version.adapter.name).inc(change)
        if not version.leases:
            self._freed.set()

    async def load(self, version: AdapterVersion) -> None:
        """Wait until a version is in memory. All that wait for it share one load.

        Raises:
            ConfigError: it cannot be loaded. Its `problem` says why.
            CapacityError: requests use all memory for adapters.
            UnavailableError: a stage was lost.
        """
        if self.holds(version):
            return
        if version.loading is None:
            version.loading = self._start(self._load(version))
        await asyncio.shield(version.loading)

    def release(self, version: AdapterVersion) -> None:
        """Let a version without leases leave memory soon, unless it is used again before."""
        self._start(self._release(version))

    async def formed(self) -> None:
        """Make all stages of a pool that has just formed hold the same adapters.

        Those that a stage cannot load leave memory, and have a `problem`.

        Raises:
            UnavailableError: a stage was lost.
        """
        async with self._change:
            try:
                await self._stages.hold(self.keys)
            except ConfigError:
                wanted, self._loaded = self._loaded, {}
                for version in wanted.values():
                    try:
                        await self._stages.hold([*self.keys, version.key])
                    except ConfigError as error:
                        _refuse(version, error)
                    else:
                        self._loaded[version.key] = version
                await self._stages.hold(self.keys)
                self.changed()

    async def _load(self, version: AdapterVersion) -> None:
        began_s = time.monotonic()
        try:
            async with self._change:
                if self.holds(version):
                    return
                await self._make_room(version.num_bytes)
                try:
                    await self._stages.hold([*self.keys, version.key])
                except ConfigError as error:
                    _refuse(version, error)
                    await self._stages.hold(self.keys)
                    raise
                self._loaded[version.key] = version
        except BatonError:
            self._metrics.loads.labels("failed").inc()
            raise
        finally:
            version.loading = None
            self.changed()
        self._metrics.loads.labels("loaded").inc()
        self._metrics.load_s.observe(time.monotonic() - began_s)

    async def _make_room(self, num_bytes: int) -> None:
        """Drop adapters without leases until so many bytes have room.

        Raises:
            CapacityError: all of them are leased for too long.
        """
        deadline_s = time.monotonic() + ROOM_S
        while self.num_bytes + num_bytes > self.max_bytes:
            idle = [version for version in self._loaded.values() if not version.leases]
            if idle:
                # Those that are retired cannot be loaded again if their files have changed.
                await self._drop(min(idle, key=lambda each: (each.is_retired, each.used_s)))
                self._metrics.evictions.inc()
                continue
            self._freed.clear()
            try:
                async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
                    await self._freed.wait()
            except TimeoutError:
                raise CapacityError(
                    f"requests use all memory for adapters, {self.max_bytes // MIB} MiB "
                    f"(--adapters-mb)",
                    resource="memory for adapters",
                ) from None

    async def _drop(self, version: AdapterVersion) -> None:
        """Drop an adapter without leases on all stages."""
        del self._loaded[version.key]  # a request that arrives now waits for a load
        deadline_s = time.monotonic() + UNUSED_S
        try:
            while await self._stages.has_any(version.key):
                if time.monotonic() >= deadline_s:
                    raise UnavailableError(
                        f"requests with the adapter {version.adapter.name} have ended, but not "
                        f"released it within {UNUSED_S:g} s"
                    )
                await asyncio.sleep(PAUSE_S)
        except BatonError:
            self._loaded[version.key] = version
            raise
        await self._stages.hold(self.keys)

    async def _release(self, version: AdapterVersion) -> None:
        async with self._change:
            if self.holds(version) and not version.leases:
                await self._drop(version)
        self.changed()

    def _start(self, work: Awaitable[None]) -> asyncio.Task[None]:
        async def run() -> None:
            await work

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("a change of adapters failed: %s", error)


def _refuse(version: AdapterVersion, error: BatonError) -> None:
    version.problem = str(error)
    logger.error("an adapter cannot be loaded: %s", error)
