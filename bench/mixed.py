"""`python -m bench.mixed`: streams that decode while long prompts arrive, Baton against vLLM on two
cores.

Baton has a prefill worker on one core and a decode worker on the other (its router shares the
first). vLLM's engine has both, and prefills in chunks of 512 between the tokens of the others. Both
have the same random bf16 weights of Qwen3-0.6B's shape. In each turn six requests decode all the
time, and every twelve seconds a prompt of 2,048 tokens arrives, with a response of 32. The sides
take turns; clients run on other cores if there are any.

    itl       gaps between the messages of the six requests, in seconds
    decode    tokens per second of the six requests
    ttft      time to the first token of a long prompt, in seconds
    lost      requests that ended with an error, long ones and the six

Ratios are Baton / vLLM, medians over turns. Bars: itl_p99 at most 0.1, decode at least 2.5, ttft at
most 1.5, and none lost. `foreign_cores` is the number of cores that other processes used; above 0.2
the figures are noise. Either side may be omitted. `bench.peers` describes the installation of vLLM.
"""

import argparse
import asyncio
import contextlib
import os
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

from baton.load import percentiles
from bench.command import benchmark_flags, run_benchmark
from bench.engine_sides import VOCAB_SIZE
from bench.mixed_sides import MAX_CONTEXT, MixedSide, baton_side, vllm_side
from bench.peer_files import write_checkpoint
from bench.report import OtherLoad, Value
from runtime.errors import BatonError

STREAM_PROMPT = 64
LONG_ANSWER = 32
LEAD_S = 2.0  # from the first tokens of all streams to the first long prompt
BARS = {"itl_p99": (0.0, 0.1), "decode": (2.5, float("inf")), "ttft": (0.0, 1.5)}


@dataclass
class MixedRequest:
    """One request as its client sees it, with times of `time.monotonic`."""

    sent_s: float = field(default_factory=time.monotonic)
    messages: list[tuple[float, int]] = field(default_factory=list)  # time and number of tokens
    failed: bool = False
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def follow(self, side: MixedSide, prompt: Sequence[int], max_tokens: int) -> None:
        try:
            async with contextlib.aclosing(side.generate(prompt, max_tokens)) as counts:
                async for count in counts:
                    self.messages.append((time.monotonic(), count))
                    self.begun.set()
        except BatonError as error:
            print(f"bench.mixed: {error}", file=sys.stderr)
            self.failed = True
            self.begun.set()

    @property
    def ttft_s(self) -> float:
        return self.messages[0][0] - self.sent_s


@dataclass(frozen=True)
class MeasuredTurn:
    """Turn of one side: streams, long prompts, and the window in which streams count."""

    streams: Sequence[MixedRequest]
    longs: Sequence[MixedRequest]
    began_s: float
    ended_s: float

    def figures(self) -> dict[str, float | None]:
        gaps = [
            after - before
            for stream in self.streams
            for (before, _), (after, _) in pairwise(stream.messages)
            if self.began_s < after <= self.ended_s
        ]
        tokens = sum(
            count
            for stream in self.streams
            for at_s, count in stream.messages
            if self.began_s < at_s <= self.ended_s
        )
        itl = percentiles(gaps, "itl")
        ttfts = [answer.ttft_s for answer in self.longs if answer.messages]
        return {
            "itl_p50": itl["itl_p50"],
            "itl_p99": itl["itl_p99"],
            "itl_max": max(gaps, default=None),
            "decode": tokens / (self.ended_s - self.began_s),
            "ttft": median(ttfts) if ttfts else None,
            "lost": sum(answer.failed for answer in (*self.streams, *self.longs)),
        }


async def run_turn(side: MixedSide, draw: random.Random, flags: argparse.Namespace) -> MeasuredTurn:
    """Run one turn; the streams are closed after the last long prompt's response."""

    def prompt(tokens: int) -> list[int]:
        return [draw.randrange(1000, VOCAB_SIZE) for _ in range(tokens)]

    streams = list[MixedRequest]()
    longs = list[MixedRequest]()
    async with asyncio.TaskGroup() as group:
        following = []
        for _ in range(flags.streams):
            streams.append(MixedRequest())
            following.append(
                group.create_task(
                    streams[-1].follow(side, prompt(STREAM_PROMPT), MAX_CONTEXT - STREAM_PROMPT)
                )
            )
        for stream in streams:
            await stream.begun.wait()
        began_s = time.monotonic()
        reading = []
        for index in range(flags.prompts):
            await asyncio.sleep(began_s + LEAD_S + index * flags.interval - time.monotonic())
            longs.append(MixedRequest())
            reading.append(
                group.create_task(longs[-1].follow(side, prompt(flags.prompt_tokens), LONG_ANSWER))
            )
        await asyncio.sleep(began_s + LEAD_S + flags.prompts * flags.interval - time.monotonic())
        ended_s = time.monotonic()
        await asyncio.gather(*reading)
        for task in following:
            task.cancel()
    return MeasuredTurn(streams, longs, began_s, ended_s)


def summarize(turns: Mapping[str, Sequence[MeasuredTurn]]) -> dict[str, Value]:
    """Return medians over turns by side, sums of lost requests, and the ratios turn by turn."""
    found = {side: [turn.figures() for turn in those] for side, those in turns.items()}
    values: dict[str, Value] = {}
    for side, figures in found.items():
        for name in figures[0]:
            seen = [figure for turn in figures if (figure := turn[name]) is not None]
            values[f"{side}_{name}"] = (sum if name == "lost" else median)(seen) if seen else None
    if len(found) == 2:
        for name in BARS:
            pairs = zip(
                (turn[name] for turn in found["baton"]),
                (turn[name] for turn in found["vllm"]),
                strict=True,
            )
            values[f"{name}_ratio"] = median(
                ours / theirs for ours, theirs in pairs if ours and theirs
            )
    return values


def missed(values: Mapping[str, Value]) -> list[str]:
    """Return the bars that are missed, of the available figures."""
    found = []
    for name, (least, most) in BARS.items():
        ratio = values.get(f"{name}_ratio")
        if isinstance(ratio, float) and not least <= ratio <= most:
            found.append(
                f"{name} is {ratio:.3g} times vLLM's, the bar is from {least:g} to {most:g}"
            )
    if values.get("baton_lost"):
        found.append(f"{values['baton_lost']} requests were lost")
    return found


def _keep_to(cores: Sequence[int]) -> None:
    """Pin all threads of this process, and processes that it starts later."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)


async def measure(flags: argparse.Namespace) -> dict[str, Value]:
    """Return the figures, or raise BatonError if a side does not start."""
    cores = sorted(os.sched_getaffinity(0))
    servers = cores[:2]
    clients = cores[2:] or cores
    model = write_checkpoint(flags.folder / "checkpoint")
    turns: dict[str, list[MeasuredTurn]] = {}
    async with AsyncExitStack() as stack:
        sides: dict[str, MixedSide] = {}
        _keep_to(servers)
        if not flags.no_baton:
            sides["baton"] = await stack.enter_async_context(
                baton_side(model, memory_mb=flags.memory_mb)
            )
        if flags.vllm_python:
            sides["vllm"] = await stack.enter_async_context(
                vllm_side(
                    flags.vllm_python,
                    model,
                    cores=servers,
                    memory_mb=flags.memory_mb,
                    chunk_tokens=512,
                    max_requests=2 * flags.streams,
                )
            )
        _keep_to(clients)
        for side in sides.values():
            await MixedRequest().follow(
                side, range(1000, 1000 + flags.prompt_tokens), LONG_ANSWER
            )  # warm-up
        others = OtherLoad()
        for turn in range(flags.turns):
            for name, side in sides.items():
                turns.setdefault(name, []).append(await run_turn(side, random.Random(turn), flags))
                print(f"turn {turn + 1}, {name}: {turns[name][-1].figures()}", file=sys.stderr)
        return {
            "streams": flags.streams,
            "prompts": flags.prompts,
            "prompt_tokens": flags.prompt_tokens,
            "interval_s": flags.interval,
            "turns": flags.turns,
            **summarize(turns),
            **others.figures(),
        }


def main() -> int:
    parser = benchmark_flags(__doc__)
    parser.add_argument(
        "--vllm-python", type=Path, help="Python interpreter of an environment with vLLM for CPUs"
    )
    parser.add_argument("--no-baton", action="store_true", help="measure only vLLM")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()) / "baton-bench-peers",
        help="directory for the weights, 1.2 GB; default %(default)s",
    )
    for name, default in (
        ("turns", 3),
        ("streams", 6),
        ("prompts", 4),
        ("prompt-tokens", 2048),
        ("memory-mb", 2048),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument(
        "--interval", type=float, default=12.0, help="seconds between long prompts; default 12"
    )
    return run_benchmark("mixed", parser, measure, missed)


if __name__ == "__main__":
    sys.exit(main())
