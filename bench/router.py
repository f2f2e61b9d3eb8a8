"""`python -m bench.router`: the router's cost of a token and of a request, against a plain relay.

A router is in front of workers that compute nothing, and a plain grpc.aio relay (two services of a
few lines) in front of a source of the same tokens (`bench.router_sides`). Both sources give every
stream a token at the same moments, as a pool does with each step. Streams of 2 tokens and long
streams go through the router and through the relay in turn, 8 and 64 at a time. The CPU time of the
process in the middle gives the cost of a request with 2 tokens, and of each further token. Ratios
are medians over turns. `tokens_per_message` is above 1 if the client was slower than the source.

Finally, a cluster decodes 8 streams of the demo model. `worker_loop_share` is the share of the
decode worker's CPU time in its event loop's thread.
"""

import argparse
import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import grpc

from baton.cluster_config import ClusterConfig, demo_model
from bench.command import benchmark_flags, run_benchmark, running_cluster
from bench.report import OtherLoad, Value, process_cpu_s
from protos import generation_pb2, generation_pb2_grpc, types_pb2
from runtime.process.announce import announced_address
from runtime.rpc.client import wait_serving
from testing.past_proxies import PAST_PROXIES

STREAMS = (8, 64)
SHORT = 2  # tokens
PROMPT = range(300, 364)
START_S = 60.0
TIMEOUT_S = 300.0


def thread_cpu_s(pid: int) -> float:
    """Return the CPU time so far of the process's first thread, which runs its event loop."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


@dataclass
class Middle:
    """Router or relay, with its cost per turn."""

    pid: int
    stub: "generation_pb2_grpc.GenerationAsyncStub"
    per_request_s: list[float] = field(default_factory=list)
    per_token_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_messages: int = 0

    async def turn(self, streams: int, requests: int, tokens: int) -> None:
        """Run short streams, then long ones."""
        before = process_cpu_s(self.pid)
        await self._ask(streams, requests, SHORT)
        request_s = (process_cpu_s(self.pid) - before) / (streams * requests)
        before = process_cpu_s(self.pid)
        await self._ask(streams, 1, tokens)
        long_s = (process_cpu_s(self.pid) - before) / streams
        self.per_request_s.append(request_s)
        self.per_token_s.append((long_s - request_s) / (tokens - SHORT))

    async def _ask(self, streams: int, requests: int, tokens: int) -> None:
        async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(self._stream(requests, tokens))

    async def _stream(self, requests: int, tokens: int) -> None:
        request = generation_pb2.GenerateRequest(
            token_ids=types_pb2.TokenIds(ids=PROMPT),
            sampling=types_pb2.SamplingParams(seed=1),
            stop=types_pb2.StopConditions(max_tokens=tokens, ignore_eos=True),
        )
        for _ in range(requests):
            count = 0
            async for response in self.stub.Generate(request):
                if response.HasField("chunk"):
                    count += len(response.chunk.token_ids)
                    self.num_messages += 1
            assert count == tokens, f"{count} tokens of {tokens}"
            self.num_tokens += count


@contextlib.asynccontextmanager
async def process(*command: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a process whose output is read here."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


async def line_of(child: asyncio.subprocess.Process) -> list[str]:
    assert child.stdout is not None
    async with asyncio.timeout(START_S):
        return (await child.stdout.readline()).decode().split()


async def compare(flags: argparse.Namespace) -> dict[str, Value]:
    """Compare router and relay."""
    values: dict[str, Value] = {}
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        source = await stack.enter_async_context(
            process(
                "-m", "bench.router_sides", "source", str(flags.model), str(flags.step_ms / 1e3)
            )
        )
        prefill, decode, plain = await line_of(source)
        relay = await stack.enter_async_context(process("-m", "bench.router_sides", "relay", plain))
        router = await stack.enter_async_context(
            process(
                "-m",
                "router",
                "--model",
                str(flags.model),
                "--listen",
                "127.0.0.1:0",
                "--prefill",
                prefill,
                "--decode",
                decode,
                "--announce",
                str(folder / "router.json"),
                "--log-level",
                "warning",
            )
        )
        async with asyncio.timeout(START_S):
            addresses = {
                "router": await announced_address(folder / "router.json"),
                "relay": (await line_of(relay))[0],
            }
        channels = {
            name: await stack.enter_async_context(
                grpc.aio.insecure_channel(address, options=PAST_PROXIES)
            )
            for name, address in addresses.items()
        }
        await wait_serving(channels["router"], "baton.v1.Generation", timeout_s=START_S)
        for streams in STREAMS:
            middles = {
                name: Middle(child.pid, generation_pb2_grpc.GenerationStub(channels[name]))
                for name, child in (("router", router), ("relay", relay))
            }
            for number in range(flags.turns + 1):
                for middle in middles.values():
                    await middle.turn(streams, flags.requests, flags.tokens)
                    if number == 0:  # now its code is loaded and its connections are open
                        middle.per_request_s.clear()
                        middle.per_token_s.clear()
            values |= figures(streams, **middles)
    return values


def figures(streams: int, router: Middle, relay: Middle) -> dict[str, Value]:
    return {
        f"streams_{streams}_router_per_token_us": round(median(router.per_token_s) * 1e6, 1),
        f"streams_{streams}_relay_per_token_us": round(median(relay.per_token_s) * 1e6, 1),
        f"streams_{streams}_per_token": ratio(router.per_token_s, relay.per_token_s),
        f"streams_{streams}_router_per_request_us": round(median(router.per_request_s) * 1e6),
        f"streams_{streams}_relay_per_request_us": round(median(relay.per_request_s) * 1e6),
        f"streams_{streams}_per_request": ratio(router.per_request_s, relay.per_request_s),
        f"streams_{streams}_tokens_per_message": round(router.num_tokens / router.num_messages, 3),
    }


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return round(median(one / other for one, other in zip(ours, theirs, strict=True)), 2)


async def worker_share(model: Path, streams: int, tokens: int) -> float:
    """Return the share of the decode worker's CPU time in its event loop's thread."""
    config = ClusterConfig(model=model, listen="127.0.0.1:0", log_level="warning")
    async with (
        running_cluster(config) as (cluster, _),
        grpc.aio.insecure_channel(cluster.address, options=PAST_PROXIES) as channel,
    ):
        pid = cluster.processes["decode-0"].pid or 0
        middle = Middle(pid, generation_pb2_grpc.GenerationStub(channel))
        await middle.turn(streams, 2, tokens)
        before = process_cpu_s(pid)
        loop_before = thread_cpu_s(pid)
        await middle.turn(streams, 1, tokens)
        return (thread_cpu_s(pid) - loop_before) / (process_cpu_s(pid) - before)


async def measure(flags: argparse.Namespace) -> dict[str, Value]:
    others = OtherLoad()
    return {
        "step_ms": flags.step_ms,
        "turns": flags.turns,
        **await compare(flags),
        "worker_loop_share": round(await worker_share(flags.model, min(STREAMS), flags.tokens), 3),
        **others.figures(),
    }


def main() -> int:
    parser = benchmark_flags(__doc__)
    parser.add_argument(
        "--model", type=Path, default=demo_model(), help="model directory; default: the demo model"
    )
    parser.add_argument(
        "--step-ms",
        type=float,
        default=25.0,
        help="milliseconds between two tokens of a stream; default 25",
    )
    for name, default in (("turns", 5), ("requests", 20), ("tokens", 200)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    return run_benchmark("router", parser, measure)


if __name__ == "__main__":
    sys.exit(main())
