"""`python -m bench.cache_tiers`: speed of the tiers of prefix caches, of one stage and in a cluster.

Random bf16 weights and caches of Qwen3-0.6B's shape. Turns of both sides alternate; a ratio is the
median over pairs of turns.

    read_ratio        bytes a second from files into the pools, checked / read into one buffer, unchecked
    warm_read_ratio   the same, of files in the kernel's page cache
    write_ratio       bytes a second from the pools into files / written from one buffer
    host_ratio        bytes a second from host memory into the pools / copied between two buffers
    server_ratio      bytes a second from a server into the pools, checked / the client's own GET
    disk_ttft_ratio   first token of a prompt that only the disk has / of an uncached one, one by one
    memory_ttft_ratio the same, of one that memory has
    server_ttft_ratio the same, of one that only the server has

Bars: `read_ratio` at least 0.7, `host_ratio` at least 0.8, `disk_ttft_ratio` at most 0.35. `--parts`
selects from: files, host, server, prompts, server-prompts. The server is that of `--server`.
"""

import argparse
import asyncio
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import redis

from baton.client import AsyncBatonClient
from baton.cluster_config import ClusterConfig
from baton.values import Query
from bench.cache import MAX_CONTEXT, RandomPrompts, Sides, ask, missed
from bench.command import benchmark_flags, run_benchmark, running_cluster
from bench.peer_files import write_checkpoint
from bench.report import OtherLoad, Value
from engine.core.layer_range import LayerRange
from engine.memory.heap import keep_freed_memory
from engine.memory.layout import PoolGeometry
from engine.memory.pools import StagePools
from engine.memory.records import HostRecords
from models.loader import read_model
from pool.tiers.block_store import Tier
from pool.tiers.cache_server import READ_BYTES, CacheServer
from pool.tiers.folder import FOLDER, CacheFolder
from pool.tiers.memory_store import MemoryStore
from pool.tiers.stage_blocks import BlockMove, StageBlocks
from transfer.transport.authenticator import new_key

BARS = {
    "read_ratio": (0.7, math.inf),
    "host_ratio": (0.8, math.inf),
    "disk_ttft_ratio": (0.0, 0.35),
}
WRITTEN_S = 60.0
STORED_S = 3.0  # for a prompt to reach the server
TIER_BYTES = 16 << 30


def stage_pools(flags: argparse.Namespace, model: Path) -> StagePools:
    """Return filled pools of one stage with all layers."""
    description = read_model(model)
    pools = StagePools(
        PoolGeometry(
            flags.page_size,
            flags.blocks + 1,
            0,
            LayerRange(0, description.facts.num_layers),
            description.cache_specs(flags.page_size),
        )
    )
    for tensor in pools.kv.values():
        tensor.normal_()
    return pools


def move_of(flags: argparse.Namespace, turn: int) -> BlockMove:
    """Return the write of all blocks of a turn."""
    page_ids = tuple(range(1, flags.blocks + 1))
    names = tuple(turn.to_bytes(8) + number.to_bytes(8) for number in page_ids)
    return BlockMove(Tier.DISK, load=False, names=names, page_ids=page_ids)


def files(flags: argparse.Namespace, pools: StagePools) -> dict[str, Value]:
    """Measure one stage and a folder, without a cluster."""
    reads, warm, writes = Sides(), Sides(), Sides()
    for turn in range(flags.turns):
        folder = flags.folder / f"files-{turn}"
        shutil.rmtree(folder, ignore_errors=True)
        blocks = StageBlocks(CacheFolder(folder, TIER_BYTES), HostRecords(pools))
        plain = [folder / f"plain-{number}" for number in range(flags.blocks)]
        size = blocks.bytes_per_block
        buffer = memoryview(bytearray(os.urandom(size)))
        store = move_of(flags, turn)
        load = replace(store, load=True)
        total = size * flags.blocks
        write_plain = partial(_write, plain, buffer)
        read_plain = partial(_read, plain, buffer)
        for sides, move, without in (
            (writes, store, write_plain),
            (reads, load, read_plain),
            (warm, load, read_plain),
        ):
            if sides is reads:
                _forget(folder)
            own_s = _seconds(partial(blocks.move, move))
            sides.add(total / own_s, total / _seconds(without))
        blocks.close()
        shutil.rmtree(folder)
    return {
        "block_bytes": blocks.bytes_per_block,
        **_figures("read", reads),
        **_figures("warm_read", warm),
        **_figures("write", writes),
    }


def host(flags: argparse.Namespace, pools: StagePools) -> dict[str, Value]:
    """Measure one stage and host memory, without a cluster."""
    blocks = StageBlocks(MemoryStore(TIER_BYTES), HostRecords(pools), key=None)
    size = blocks.bytes_per_block
    source, target = (np.random.default_rng(0).bytes(size * flags.blocks) for _ in range(2))
    from_bytes, to_bytes = np.frombuffer(source, np.uint8), np.frombuffer(target, np.uint8).copy()
    blocks.move(move_of(flags, 0))
    reads, load = Sides(), replace(move_of(flags, 0), load=True)
    for _ in range(flags.turns):
        own_s = _seconds(partial(blocks.move, load))
        plain_s = _seconds(partial(np.copyto, to_bytes, from_bytes))
        reads.add(size * flags.blocks / own_s, size * flags.blocks / plain_s)
    blocks.close()
    return _figures("host", reads)


def server(flags: argparse.Namespace, pools: StagePools) -> dict[str, Value]:
    """Measure one stage and a server, without a cluster."""
    key = new_key()
    client = redis.Redis.from_url(flags.server, socket_read_size=READ_BYTES)
    blocks = StageBlocks(CacheServer(flags.server, key, expire_s=60), HostRecords(pools), key=key)
    size = blocks.bytes_per_block
    blocks.move(move_of(flags, 0))
    client.set("plain", os.urandom(size), ex=60)
    reads, load = Sides(), replace(move_of(flags, 0), load=True)
    for _ in range(flags.turns):
        own_s = _seconds(partial(blocks.move, load))
        plain_s = _seconds(partial(_get, client, flags.blocks))
        reads.add(size * flags.blocks / own_s, size * flags.blocks / plain_s)
    blocks.close()
    client.close()
    return _figures("server", reads)


def _get(client: redis.Redis, count: int) -> None:
    for _ in range(count):
        client.get("plain")


def _figures(name: str, sides: Sides) -> dict[str, Value]:
    return {f"{name}_gb_s": median(sides.side) / 1e9, f"{name}_ratio": sides.ratio}


def _seconds(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def _write(paths: Sequence[Path], buffer: memoryview) -> None:
    for path in paths:
        path.write_bytes(buffer)


def _read(paths: Sequence[Path], buffer: memoryview) -> None:
    for path in paths:
        with path.open("rb", buffering=0) as file:
            assert file.readinto(buffer) == len(buffer)


def _forget(folder: Path) -> None:
    """Write files to the disk, and drop them from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


@asynccontextmanager
async def warm_cluster(
    flags: argparse.Namespace, model: Path, source: RandomPrompts, **tier: object
) -> AsyncIterator[AsyncBatonClient]:
    """Run a prefill worker and a decode worker with a tier, after two prompts."""
    config = ClusterConfig.model_validate(
        {
            "model": model,
            "memory_mb": flags.memory_mb,
            "max_context": MAX_CONTEXT,
            "listen": "127.0.0.1:0",
            "log_level": "warning",
            "worker_flags": ("--page-size", str(flags.page_size)),
            **tier,
        }
    )
    async with running_cluster(config) as (_, client):
        for _ in range(2):
            await ask(client, source.cold())
        yield client


async def _cached_s(flags: argparse.Namespace, client: AsyncBatonClient, query: Query) -> float:
    """Return the time to first token of a prompt that is cached but for its last page."""
    told = await ask(client, query)
    assert told.cached_tokens >= flags.prompt_tokens - flags.page_size - 1
    return told.times_s[0]


async def prompts(flags: argparse.Namespace, model: Path) -> dict[str, Value]:
    """Measure a prefill worker and a decode worker that share a folder."""
    folder = flags.folder / "disk"
    shutil.rmtree(folder, ignore_errors=True)
    source = RandomPrompts(flags.prompt_tokens, 1.0)
    from_disk, from_memory = Sides(), Sides()
    async with warm_cluster(flags, model, source, disk_cache=folder) as client:
        others = OtherLoad()
        for _ in range(flags.turns):
            query = source.cold()
            before = _num_files(folder)
            cold_s = (await ask(client, query)).times_s[0]
            warm_s = (await ask(client, query)).times_s[0]
            await _until_written(folder, before + flags.prompt_tokens // flags.page_size)
            await client.flush_caches()
            from_disk.add(await _cached_s(flags, client, query), cold_s)
            from_memory.add(warm_s, cold_s)
        shutil.rmtree(folder)
        return {
            "prompt_tokens": flags.prompt_tokens,
            "ttft_cold_s": median(from_disk.base),
            "ttft_disk_s": median(from_disk.side),
            "ttft_memory_s": median(from_memory.side),
            "disk_ttft_ratio": from_disk.ratio,
            "memory_ttft_ratio": from_memory.ratio,
            **others.figures(),
        }


async def server_prompts(flags: argparse.Namespace, model: Path) -> dict[str, Value]:
    """Measure a prefill worker and a decode worker that share a server."""
    with tempfile.NamedTemporaryFile() as key:
        key.write(new_key())
        key.flush()
        source, from_server = RandomPrompts(flags.prompt_tokens, 1.0), Sides()
        async with warm_cluster(
            flags, model, source, cache_server=flags.server, cache_server_key=Path(key.name)
        ) as client:
            for _ in range(flags.turns):
                query = source.cold()
                cold_s = (await ask(client, query)).times_s[0]
                await asyncio.sleep(STORED_S)
                await client.flush_caches()
                from_server.add(await _cached_s(flags, client, query), cold_s)
    return {
        "ttft_server_s": median(from_server.side),
        "server_ttft_ratio": from_server.ratio,
    }


def _num_files(folder: Path) -> int:
    return sum(1 for _ in (folder / FOLDER).rglob("page.*"))


async def _until_written(folder: Path, num_files: int) -> None:
    async with asyncio.timeout(WRITTEN_S):
        while _num_files(folder) < num_files:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def measure(flags: argparse.Namespace) -> dict[str, Value]:
    model = write_checkpoint(flags.folder / "checkpoint")
    values: dict[str, Value] = {"turns": flags.turns}
    parts = flags.parts.split(",")
    keep_freed_memory()  # as workers do
    pools = stage_pools(flags, model)
    for part in (files, host, server):
        if part.__name__ in parts:
            values |= await asyncio.to_thread(part, flags, pools)
    del pools
    if "prompts" in parts:
        values |= await prompts(flags, model)
    if "server-prompts" in parts:
        values |= await server_prompts(flags, model)
    return values


def main() -> int:
    parser = benchmark_flags(__doc__)
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()) / "baton-bench-peers",
        help="directory for the weights, 1.2 GB, and the files; default %(default)s",
    )
    for name, default in (
        ("prompt-tokens", 1920),
        ("turns", 5),
        ("blocks", 64),
        ("memory-mb", 3072),
        ("page-size", 64),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument(
        "--parts", default="files,host,prompts", help="parts to run; default %(default)s"
    )
    parser.add_argument("--server", default="redis://127.0.0.1:6379", help="default %(default)s")
    return run_benchmark("cache_tiers", parser, measure, partial(missed, bars=BARS))


if __name__ == "__main__":
    sys.exit(main())
