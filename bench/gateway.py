"""`python -m bench.gateway`: cost of the OpenAI gateway, and delay until a disconnected client's
pages are free.

A local cluster has the gateway in front of it. The same greedy chat goes to the router over gRPC
and to the gateway over HTTP, in turns. Streams of a fixed length then show the cost of a chunk in
the processes of gateway and router. Finally, clients close their connection during a stream, and
the decode pool reports when all its pages are free again.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

import httpx2

from baton.client import AsyncBatonClient
from baton.cluster_config import ClusterConfig, demo_model
from baton.values import ChatMessage, Chunk, Query, Sampling, Stop
from bench.command import benchmark_flags, run_benchmark, running_cluster
from bench.report import Value, process_cpu_s
from protos import worker_pb2, worker_pb2_grpc
from runtime.errors import BatonError
from runtime.rpc.client import open_channel

QUESTION = "Count from 3 by 2."
TIMEOUT_S = 120.0
WATCHERS = 5  # a report every 10 ms


def body(model: str, max_tokens: int, *, is_endless: bool) -> dict[str, object]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "stream": True,
        "max_tokens": max_tokens,
        "ignore_eos": is_endless,
    }


async def pieces(http: httpx2.AsyncClient, request: dict[str, object]) -> AsyncGenerator[str, None]:
    """Yield the text of each chunk of a streamed chat that has text."""
    async with http.stream("POST", "/v1/chat/completions", json=request) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    if text := choice["delta"].get("content"):
                        yield text


async def first_s(stream: AsyncIterator[object]) -> float:
    """Return the seconds to the first item; read the rest as well."""
    started = time.perf_counter()
    first = None
    async for _ in stream:
        first = time.perf_counter() - started if first is None else first
    if first is None:
        raise BatonError("a stream without a token")
    return first


async def chunks(client: AsyncBatonClient, query: Query) -> AsyncIterator[Chunk]:
    async with contextlib.aclosing(client.generate(query, timeout_s=TIMEOUT_S)) as events:
        async for event in events:
            if isinstance(event, Chunk) and event.text:
                yield event


class FreePages:
    """Free pages of a decode pool, reported to several watchers in turn.

    One watcher gets a report every 50 ms.
    """

    def __init__(self) -> None:
        self.pages_free = 0
        self.pages_total = 0
        self._news = asyncio.Event()

    async def watch(self, address: str, *, after_s: float) -> None:
        await asyncio.sleep(after_s)
        async with open_channel(address) as channel:
            async for response in worker_pb2_grpc.WorkerStub(channel).Watch(
                worker_pb2.WatchRequest(interval_s=0.05)
            ):
                if response.HasField("info"):
                    self.pages_total = response.info.pages_total
                else:
                    self.pages_free = response.load.pages_free
                    self._news.set()

    async def until(self, *, is_free: bool) -> None:
        """Wait until no page is held, or until some are. The first report after the call counts."""
        self._news.clear()
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                await self._news.wait()
                self._news.clear()
                if (self.pages_free == self.pages_total) is is_free:
                    return


async def forgotten_s(http: httpx2.AsyncClient, model: str, held: FreePages) -> float:
    """Return the seconds from closing the connection to decode's report that all pages are free."""
    stream = pieces(http, body(model, 1900, is_endless=True))
    await anext(stream)
    await held.until(is_free=False)
    started = time.perf_counter()
    await stream.aclose()
    await held.until(is_free=True)
    return time.perf_counter() - started


async def measure(flags: argparse.Namespace) -> dict[str, Value]:
    config = ClusterConfig(
        model=flags.model, listen="127.0.0.1:0", http="127.0.0.1:0", log_level="warning"
    )
    async with (
        running_cluster(config) as (cluster, client),
        httpx2.AsyncClient(
            base_url=f"http://{cluster.http_address}", timeout=TIMEOUT_S, trust_env=False
        ) as http,
    ):
        model = (await client.model_info()).model
        query = Query((ChatMessage("user", QUESTION),), Sampling(temperature=0), Stop(max_tokens=8))
        grpc_s = []
        http_s = []
        for _ in range(flags.requests):
            grpc_s.append(await first_s(chunks(client, query)))
            http_s.append(await first_s(pieces(http, body(model, 8, is_endless=False))))
        pids = {name: cluster.processes[name].pid or 0 for name in ("gateway", "router")}
        before = {name: process_cpu_s(pid) for name, pid in pids.items()}
        await asyncio.gather(
            *(
                first_s(pieces(http, body(model, flags.tokens, is_endless=True)))
                for _ in range(flags.streams)
            )
        )
        spent = {name: process_cpu_s(pid) - before[name] for name, pid in pids.items()}
        announcement = cluster.processes["decode-0"].announcement
        assert announcement is not None
        held = FreePages()
        watching = [
            asyncio.create_task(held.watch(announcement.address, after_s=index * 0.01))
            for index in range(WATCHERS)
        ]
        gone_s = [await forgotten_s(http, model, held) for _ in range(flags.leavers)]
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
    num_chunks = flags.streams * flags.tokens
    return {
        "requests": flags.requests,
        "ttft_grpc_ms": statistics.median(grpc_s) * 1e3,
        "ttft_http_ms": statistics.median(http_s) * 1e3,
        "ttft_added_ms": (statistics.median(http_s) - statistics.median(grpc_s)) * 1e3,
        "chunks": num_chunks,
        "gateway_cpu_per_chunk_us": spent["gateway"] / num_chunks * 1e6,
        "router_cpu_per_chunk_us": spent["router"] / num_chunks * 1e6,
        "leavers": flags.leavers,
        "forgotten_median_ms": statistics.median(gone_s) * 1e3,
        "forgotten_max_ms": max(gone_s) * 1e3,
    }


def main() -> int:
    parser = benchmark_flags(__doc__)
    parser.add_argument(
        "--model", type=Path, default=demo_model(), help="model directory; default: the demo model"
    )
    for name, default in (("requests", 100), ("streams", 8), ("tokens", 400), ("leavers", 20)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    return run_benchmark("gateway", parser, measure)


if __name__ == "__main__":
    sys.exit(main())
