"""`python -m bench.speculation`: decode tokens per second with a draft and without, by running
requests.

Two clusters run at the same time, one with the draft. The same prompts go to both in turn, so that
other load affects both. With `--model-alone` a third one has the draft model without drafts from the
requests' own text. The responses must be equal. Each shape of a step is recorded after a few
repetitions, and drafts create many shapes, so other prompts of the same number run first,
uncounted. Step times and planner calls are the pools' own metrics, over all prompts.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from baton.client import AsyncBatonClient
from baton.cluster_config import ClusterConfig, demo_model
from baton.values import Finish, Prompt, Query, Sampling, Stop, StructuredOutput
from bench.command import benchmark_flags, run_benchmark, running_cluster
from bench.pool_metrics import PoolPorts, decode_ports, planner_calls
from bench.repeating import FACTS, KINDS, prompts
from bench.report import Value
from demo.corpus import speculation_prompts
from engine.speculative.contracts.config import SUFFIX

REQUEST_TIMEOUT_S = 120.0


@dataclass
class ClusterSide:
    """One of the two clusters, with its tokens after the first one and their seconds."""

    client: AsyncBatonClient
    ports: PoolPorts
    tokens: int = 0
    seconds: float = 0.0
    answers: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    async def run(self, queries: Sequence[Query]) -> None:
        """Run all queries at once; count from the first token of the round to its last."""
        results = await asyncio.gather(*(self._ask(query) for query in queries))
        began = min(first for _, first, _ in results)
        self.tokens += sum(len(ids) - 1 for ids, _, _ in results)
        self.seconds += max(last for _, _, last in results) - began
        self.answers += [ids for ids, _, _ in results]

    async def _ask(self, query: Query) -> tuple[tuple[int, ...], float, float]:
        ids: list[int] = []
        first = last = 0.0
        async for event in self.client.generate(query, timeout_s=REQUEST_TIMEOUT_S):
            if not isinstance(event, Finish) and event.token_ids:
                last = time.monotonic()
                first = first or last
                ids += event.token_ids
        return tuple(ids), first, last

    async def steps(self, name: str) -> dict[str, Value]:
        """Return the tokens per request and pass, step seconds, and planner calls since the start.

        Planner calls are per step of the last stage, by path.
        """
        leader = await self.ports.leader()
        last = await self.ports.last_stage()
        calls = planner_calls(last)
        return {
            f"{name}_tokens_per_pass": leader.mean("baton_spec_accept_length"),
            f"{name}_step_s": leader.mean("baton_spec_step_seconds", drafts="yes")
            or leader.mean("baton_pp_step_seconds"),
            **{f"{name}_planner_calls_per_step_{path}": calls[path] for path in calls},
        }


@asynccontextmanager
async def side(flags: argparse.Namespace, *worker_flags: str) -> AsyncIterator[ClusterSide]:
    config = ClusterConfig(
        model=flags.model,
        decode_pp=flags.decode_pp,
        listen="127.0.0.1:0",
        log_level="warning",
        # The default share is for a machine with one cluster.
        worker_flags=("--memory-share", "0.1", *worker_flags),
    )
    async with running_cluster(config) as (cluster, client):
        yield ClusterSide(client, await decode_ports(cluster))


async def measure(flags: argparse.Namespace) -> dict[str, Value]:
    draft: tuple[str, ...] = (
        "--draft",
        str(flags.draft),
        "--spec-draft-tokens",
        str(flags.draft_tokens),
    )
    if flags.draft != SUFFIX:
        draft += ("--spec-topk", str(flags.topk), "--spec-steps", str(flags.steps))
    values: dict[str, Value] = {
        "decode_pp": flags.decode_pp,
        "draft": f"{flags.draft.name}, top-{flags.topk}, {flags.steps} steps, {flags.draft_tokens} tokens",
    }
    async with AsyncExitStack() as stack:
        plain = await stack.enter_async_context(side(flags))
        drafting = await stack.enter_async_context(side(flags, *draft))
        sides = [plain, drafting]
        if flags.model_alone:
            sides.append(await stack.enter_async_context(side(flags, *draft, "--no-spec-suffix")))
        for kind in flags.prompts_of:
            queries = _queries(kind, flags)
            for batch in flags.batches:
                await _measure_batch(sides, queries, batch)
                values |= {
                    f"{kind}_plain_tokens_per_s_{batch}": plain.rate,
                    f"{kind}_draft_tokens_per_s_{batch}": drafting.rate,
                    f"{kind}_speedup_{batch}": drafting.rate / plain.rate,
                }
                if flags.model_alone:
                    values[f"{kind}_over_model_alone_{batch}"] = drafting.rate / sides[2].rate
        values |= {**await plain.steps("plain"), **await drafting.steps("draft")}
        if flags.model_alone:
            values |= await sides[2].steps("model_alone")
        values["answers_equal"] = all(each.answers == plain.answers for each in sides)
    return values


async def _measure_batch(
    sides: Sequence[ClusterSide], queries: Sequence[Query], batch: int
) -> None:
    """Run the second half of the queries uncounted, then the first half, `batch` at once."""
    half = len(queries) // 2
    for asked in (queries[half:], queries[:half]):
        for each in sides:
            each.tokens = 0
            each.seconds = 0.0
        for start in range(0, len(asked) - batch + 1, batch):
            for each in sides:
                await each.run(asked[start : start + batch])


def _queries(kind: str, flags: argparse.Namespace) -> list[Query]:
    """Return twice as many queries as are counted."""
    count = 2 * flags.prompts
    if kind == "stories":
        asked: Sequence[Prompt] = [item.prompt for item in speculation_prompts(count, seed=0)]
    else:
        vocab_size = json.loads((flags.model / "config.json").read_text())["vocab_size"]
        asked = prompts(kind, count, vocab_size=vocab_size)
    output = StructuredOutput(FACTS) if kind == "schema" else None
    stop = Stop(max_tokens=flags.output_tokens)
    return [
        Query(prompt, Sampling(temperature=0), stop, structured_output=output) for prompt in asked
    ]


def main() -> int:
    parser = benchmark_flags(__doc__)
    parser.add_argument(
        "--model", type=Path, default=demo_model(), help="model directory; default: the demo model"
    )
    parser.add_argument(
        "--draft",
        type=Path,
        default=demo_model().parent / "draft",
        help="draft model directory, or suffix; default: the demo draft",
    )
    parser.add_argument(
        "--model-alone",
        action="store_true",
        help="also run the draft model without drafts from requests' own text",
    )
    parser.add_argument(
        "--prompts-of",
        nargs="+",
        choices=("stories", *KINDS),
        default=["stories"],
        help="kinds of prompts; default stories, of the demo model's corpus",
    )
    for name, default in (
        ("decode-pp", 1),
        ("topk", 1),
        ("steps", 5),
        ("draft-tokens", 5),
        ("prompts", 16),
        ("output-tokens", 96),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument(
        "--batches",
        type=int,
        nargs="+",
        default=[1, 4, 8],
        help="numbers of concurrent requests; default 1 4 8",
    )
    return run_benchmark(
        "speculation",
        parser,
        measure,
        lambda values: [] if values["answers_equal"] else ["answers differ"],
    )


if __name__ == "__main__":
    sys.exit(main())
