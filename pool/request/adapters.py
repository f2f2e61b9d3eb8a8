"""The adapters that requests of a pool may have."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from models.adapters import Adapter, read_adapter
from models.loader import ModelDescription
from pool.request.adapter_memory import AdapterMemory, AdapterVersion, StagesAdapters
from protos.adapters_pb2 import AdapterStatus
from runtime.errors import ConfigError, UnavailableError
from runtime.model_files.adapter_folders import MAX_ADAPTERS, adapter_folder, adapter_name
from runtime.observe.metrics.pools import AdapterMetrics
from runtime.process.host_memory import MIB

# Seconds that a version is still accepted after another one took its name. Routers learn within
# them which one they must ask for, and requests that they have accepted before find it.
GRACE_S = 60.0
LOOK_S = 1.0  # seconds between two looks at the requests that still have it

logger = logging.getLogger(__name__)


class PoolAdapters:
    """The adapters of a pool. Belongs to the event loop's thread of the leader.

    A request leases its adapter for as long as it runs. A request for an adapter that is not in
    memory waits until it is loaded.
    """

    def __init__(
        self,
        folder: Path | None,
        description: ModelDescription,
        loaded: Sequence[str],
        stages: StagesAdapters,
        metrics: AdapterMetrics,
    ) -> None:
        """Create the adapters of a pool whose stages have `loaded` some with their layers.

        `folder` is None for a pool that takes none.
        """
        self._folder = folder
        self._description = description
        self._known = {adapter.key: self._of(adapter) for adapter in description.adapters}
        self._memory = AdapterMemory(
            description.adapter_bytes or 0,
            stages,
            metrics,
            [version for key, version in self._known.items() if key in loaded],
        )
        self._memory.changed = self._show
        self._metrics = metrics
        self._names = asyncio.Lock()  # for changes of what is offered
        # Called when other adapters are accepted, or in memory.
        self.changed: Callable[[], object] = lambda: None
        self._show()

    @property
    def max_bytes(self) -> int:
        """Return the bytes of memory for adapters, on all stages together."""
        return self._memory.max_bytes

    @property
    def accepted(self) -> list[str]:
        """Return the keys that requests may have."""
        return [version.key for version in self._known.values() if not version.problem]

    @property
    def retired(self) -> list[str]:
        """Return those of `accepted` that are not offered to new requests."""
        return [
            version.key
            for version in self._known.values()
            if version.is_retired and not version.problem
        ]

    @property
    def loaded(self) -> list[str]:
        """Return the keys of the adapters in memory."""
        return self._memory.keys

    def statuses(self) -> list[AdapterStatus]:
        """Return the status of each adapter, by name."""
        return [self._status(version) for _, version in sorted(self._known.items())]

    def check(self, key: str) -> None:
        """Check that a request may have this adapter.

        Raises:
            UnavailableError: it may not, or not any more. Another worker may have the adapter.
        """
        version = self._known.get(key)
        if version is None or version.problem:
            raise UnavailableError(
                f"this pool does not have the adapter {adapter_name(key)[:80]!r} in the version that "
                f"the request asks for{f': {version.problem}' if version is not None else ''}"
            )

    def check_loaded(self, key: str) -> None:
        """Check that a leased adapter is still in memory.

        Raises:
            UnavailableError: a stage that joined again could not load it.
        """
        self.check(key)
        if not self._memory.holds(self._known[key]):
            raise UnavailableError(
                f"this pool has formed again without the adapter {adapter_name(key)[:80]!r}"
            )

    @asynccontextmanager
    async def leased(self, key: str) -> AsyncIterator[None]:
        """Have an adapter in memory for the length of the block.

        Raises:
            UnavailableError: it cannot be loaded.
            CapacityError: requests use all memory for adapters.
        """
        self.check(key)
        version = self._known[key]
        self._memory.lease(version, 1)
        try:
            try:
                await self._memory.load(version)
            except ConfigError as error:
                raise UnavailableError(str(error)) from error
            yield
        finally:
            self._memory.lease(version, -1)

    async def formed(self) -> None:
        """Make all stages of a pool that has just formed hold the same adapters.

        Raises:
            UnavailableError: a stage was lost.
        """
        await self._memory.formed()

    async def load(self, name: str) -> AdapterStatus:
        """Read an adapter from the folder, load it and offer it; return its status.

        A version that was offered before is retired.

        Raises:
            ConfigError: the folder has none, or one that this pool cannot serve.
            CapacityError: requests use all memory for adapters.
            UnavailableError: a stage was lost.
        """
        if self._folder is None:
            raise ConfigError("this pool was started without --adapters", field="adapters")
        async with self._names:
            adapter = await asyncio.to_thread(_read, self._folder, name)
            before = self._offered(name)
            num_offered = sum(not version.is_retired for version in self._known.values())
            if before is None and num_offered >= MAX_ADAPTERS:
                raise ConfigError(
                    f"a pool offers up to {MAX_ADAPTERS} adapters, and this one does",
                    field="adapters",
                )
            version = await self._load_version(adapter)
            version.is_retired = False
            if before is not None and before is not version:
                self._retire(before)
            self._show()
            logger.info("offering an adapter", extra={"adapter": name, "digest": adapter.digest})
            return self._status(version)

    async def unload(self, name: str) -> AdapterStatus:
        """Offer an adapter no more; return the status of the version that was offered.

        Raises:
            ConfigError: it is not offered.
        """
        async with self._names:
            version = self._offered(name)
            if version is None:
                raise ConfigError(f"no adapter {name[:80]!r} is offered", field="adapters")
            self._retire(version)
            self._show()
            logger.info("offering an adapter no more", extra={"adapter": name})
            return self._status(version)

    async def _load_version(self, adapter: Adapter) -> AdapterVersion:
        """Load a version of an adapter; a new one is accepted, but not offered yet."""
        version = self._known.get(adapter.key)
        if version is not None:
            version.problem = ""
            await self._memory.load(version)
            return version
        version = self._of(adapter)
        if version.num_bytes > self.max_bytes:
            raise ConfigError(
                f"adapter {adapter.name} needs {-(-version.num_bytes // MIB)} MiB, and adapters_mb is "
                f"{self.max_bytes // MIB}",
                field="adapters_mb",
            )
        version.is_retired = True
        self._known[adapter.key] = version
        try:
            await self._memory.load(version)
        except asyncio.CancelledError:
            self._retire(version)  # it is still being loaded, for no one
            raise
        except Exception:
            del self._known[adapter.key]
            raise
        return version

    def _status(self, version: AdapterVersion) -> AdapterStatus:
        return version.status(is_loaded=self._memory.holds(version))

    def _of(self, adapter: Adapter) -> AdapterVersion:
        return AdapterVersion(adapter, self._description.bytes_of(adapter))

    def _offered(self, name: str) -> AdapterVersion | None:
        return next(
            (
                version
                for version in self._known.values()
                if version.adapter.name == name and not version.is_retired
            ),
            None,
        )

    def _retire(self, version: AdapterVersion) -> None:
        version.is_retired = True
        asyncio.get_running_loop().call_later(GRACE_S, self._forget, version)

    def _forget(self, version: AdapterVersion) -> None:
        """Forget a retired version, once no request has it."""
        if not version.is_retired or self._known.get(version.key) is not version:
            return
        if version.leases or version.loading is not None:
            asyncio.get_running_loop().call_later(LOOK_S, self._forget, version)
            return
        del self._known[version.key]
        if self._memory.holds(version):
            self._memory.release(version)
        self._show()

    def _show(self) -> None:
        """Show by metrics and to routers what is accepted and in memory."""
        num_loaded = len(self.loaded)
        self._metrics.adapters.labels("loaded").set(num_loaded)
        self._metrics.adapters.labels("cold").set(max(0, len(self._known) - num_loaded))
        self._metrics.num_bytes.set(self._memory.num_bytes)
        self._metrics.max_bytes.set(self.max_bytes)
        self.changed()


def _read(folder: Path, name: str) -> Adapter:
    adapter = read_adapter(adapter_folder(folder, name))
    _ = adapter.digest  # read here, in a thread
    return adapter
