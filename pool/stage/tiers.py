"""The tiers of a stage's prefix cache, as its settings name them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from engine.core.numerics import HOST
from engine.memory.pools import StagePools
from engine.memory.records import DeviceRecords, HostRecords, RecordMemory
from engine.memory.staging import CudaCopies
from pool.stage.config import WorkerConfig
from pool.tiers.block_store import BlockStore, Tier
from pool.tiers.copies import ReportedCopies
from pool.tiers.folder import CacheFolder
from pool.tiers.memory_store import MemoryStore
from pool.tiers.stage_blocks import StageBlocks
from runtime.errors import ConfigError
from runtime.process.host_memory import MIB, host_memory
from transfer.transport.authenticator import KEY_BYTES, derived


@dataclass(frozen=True)
class StageTiers:
    """The tiers of a stage.

    Attributes:
        blocks: each of them, in the order in which they are asked.
        copies: what those have that belong to the worker.
    """

    blocks: Mapping[Tier, StageBlocks] = field(default_factory=dict)
    copies: ReportedCopies = field(default_factory=ReportedCopies)


def open_tiers(config: WorkerConfig, pools: StagePools, device: torch.device) -> StageTiers:
    """Return the tiers that `config` names.

    Raises:
        ConfigError: the host has not enough memory, or a place, a key or an address cannot be used.
    """
    opened = dict[Tier, StageBlocks]()
    copies = ReportedCopies(has_states=any(spec.kind.is_state for spec in pools.geometry.specs))
    if config.host_cache_mb:
        wanted, free = config.host_cache_mb * MIB, host_memory().available_bytes
        if wanted > free:
            raise ConfigError(
                f"--host-cache-mb {config.host_cache_mb}, and {free // MIB} MiB are free",
                field="host_cache_mb",
            )
        store = MemoryStore(wanted, copies.of_tier())
        opened[Tier.HOST] = StageBlocks(store, _records(pools, device), key=None)
    if config.disk_cache is not None:
        folder = CacheFolder(config.disk_cache, config.disk_cache_mb * MIB, copies.of_tier())
        opened[Tier.DISK] = StageBlocks(folder, _records(pools, device))
    if config.cache_server is not None and config.cache_server_key is not None:
        key = read_key(config.cache_server_key)
        server = _server(config.cache_server, key, config.cache_server_expire_s)
        opened[Tier.SERVER] = StageBlocks(server, _records(pools, device), key=key)
    return StageTiers(opened, copies)


def read_key(path: Path) -> bytes:
    """Return the 32 bytes that stand for the content of a file of random bytes.

    Raises:
        ConfigError: it cannot be read, or has fewer than 32 bytes.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cache_server_key: {error}", field="cache_server_key") from error
    if len(content) < KEY_BYTES:
        raise ConfigError(
            f"cache_server_key {path} has {len(content)} bytes, and needs {KEY_BYTES} random ones",
            field="cache_server_key",
        )
    return derived(bytes(KEY_BYTES), "baton server", content)


def _server(url: str, key: bytes, expire_s: int) -> BlockStore:
    try:
        from pool.tiers.cache_server import CacheServer
    except ImportError as error:
        raise ConfigError(
            f"cache_server needs the package redis: pip install 'baton[redis]' ({error})",
            field="cache_server",
        ) from error
    return CacheServer(url, key, expire_s=expire_s)


def _records(pools: StagePools, device: torch.device) -> RecordMemory:
    if device == HOST:
        return HostRecords(pools)
    return DeviceRecords(pools, CudaCopies(device), CudaCopies(device))
