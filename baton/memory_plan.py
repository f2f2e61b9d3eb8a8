"""Division of this machine's memory between the workers of a local cluster."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from baton.preflight import PoolShape, counted, setting
from runtime.errors import ConfigError
from runtime.model_files.weights import loaded_bytes
from runtime.process.host_memory import MIB, HostMemory, host_memory

HOST_SHARE, DEVICE_SHARE = (
    0.8,
    0.85,
)  # of the host's free memory, or of a device's, for all workers together
PROCESS_BYTES = 384 * MIB  # of a worker, besides weights and cache
LEAST_CACHE_BYTES = 64 * MIB


def memory_flags(
    shapes: Sequence[PoolShape],
    tables: Mapping[str, Mapping[str, object]],
    model: Path,
    memory: HostMemory | None = None,
) -> dict[str, tuple[str, ...]]:
    """Return by role the flags that divide the free memory between the workers.

    The memory is that of this machine, or of the device that all workers use. A role whose flags or
    table limit its memory gets none.

    Raises:
        ConfigError: the weights of all pools do not fit into the host's memory, or leave no memory
            for the caches of workers without a limit, or limits exceed the host's memory.
    """
    devices = {shape.role: setting(shape, tables, "device") or "cpu" for shape in shapes}
    on_host = [shape for shape in shapes if devices[shape.role] == "cpu"]
    flags: dict[str, tuple[str, ...]] = {}
    if on_host:
        own = all(_has_own(shape, tables) for shape in on_host)
        memory = memory or host_memory()
        _check_limits(on_host, tables, memory)
        each = _host_bytes(on_host, model, memory, may_be_none=own)
        flags |= {shape.role: ("--memory-mb", str(each // MIB)) for shape in on_host}
    num_on_device = sum(shape.num_processes for shape in shapes if shape not in on_host)
    flags |= {
        shape.role: ("--memory-share", f"{DEVICE_SHARE / num_on_device:.3f}")
        for shape in shapes
        if shape not in on_host
    }
    return {shape.role: () if _has_own(shape, tables) else flags[shape.role] for shape in shapes}


def _check_limits(
    shapes: Sequence[PoolShape], tables: Mapping[str, Mapping[str, object]], memory: HostMemory
) -> None:
    """Raise ConfigError if the caches that are asked for exceed the host's memory."""
    texts = {shape.role: setting(shape, tables, "memory_mb") for shape in shapes}
    limits = {role: int(text) if text.isdecimal() else 0 for role, text in texts.items()}
    total = sum(shape.num_processes * limits[shape.role] for shape in shapes)
    if total * MIB > memory.total_bytes:
        parts = " + ".join(
            f"{shape.num_processes} * {limits[shape.role]} MiB ({shape.role})"
            for shape in shapes
            if limits[shape.role]
        )
        raise ConfigError(
            f"--memory-mb: {parts} is {total} MiB, and this machine has "
            f"{memory.total_bytes // MIB} MiB",
            field="memory_mb",
        )


def leaves_room(shapes: Sequence[PoolShape], model: Path, memory: HostMemory) -> bool:
    """Return whether weights and processes of these pools leave memory for caches on the host."""
    return _cache_bytes(shapes, loaded_bytes(model), memory) > 0


def _cache_bytes(shapes: Sequence[PoolShape], weights: int, memory: HostMemory) -> int:
    """Return the bytes that pools with these weights leave for caches; negative if none are left."""
    return (
        int(HOST_SHARE * memory.available_bytes)
        - sum(shape.count for shape in shapes) * weights
        - sum(shape.num_processes for shape in shapes) * PROCESS_BYTES
    )


def _host_bytes(
    shapes: Sequence[PoolShape], model: Path, memory: HostMemory, *, may_be_none: bool
) -> int:
    """Return the bytes of cache of each process, or raise ConfigError."""
    weights = loaded_bytes(model)
    num_pools = sum(shape.count for shape in shapes)
    num_processes = sum(shape.num_processes for shape in shapes)
    if num_pools * weights > memory.available_bytes:
        raise ConfigError(
            f"{counted(num_pools, 'pool')} of {model.resolve().name} take {num_pools} * "
            f"{weights / MIB:.0f} MiB = {num_pools * weights / MIB:.0f} MiB for weights alone, "
            f"and {memory.available_bytes / MIB:.0f} of {memory.total_bytes / MIB:.0f} MiB are "
            "free on this machine: use fewer pools (--prefill, --decode), one pool of both roles "
            "(--aggregated), a smaller model, or a larger machine",
            field="model",
        )
    left = _cache_bytes(shapes, weights, memory)
    if left <= 0 and not may_be_none:
        raise ConfigError(
            f"no memory is left for caches: {HOST_SHARE:g} of the {memory.available_bytes / MIB:.0f} "
            f"MiB that are free on this machine, less {num_pools} * {weights / MIB:.0f} MiB of "
            f"weights and {num_processes} * {PROCESS_BYTES / MIB:.0f} MiB of processes, is {left / MIB:.0f} "
            "MiB: use fewer pools or stages, or set --memory-mb",
            field="memory_mb",
        )
    return max(left // num_processes, LEAST_CACHE_BYTES)


def _has_own(shape: PoolShape, tables: Mapping[str, Mapping[str, object]]) -> bool:
    return any(
        setting(shape, tables, name) not in ("", "0")
        for name in ("memory_mb", "memory_share", "num_pages")
    )
