"""`python -m bench.cache_bound TRACE`: upper bound of a cache's gain in time to first token.

The model is one queue and `--servers` prefill workers, without handoff and decode. A token takes
one unit of time, and one more for each `--attention-tokens` before it (0: attention is free). The
base side computes every prompt whole, oldest first, at `--load` times its capacity. The other side
has a cache that is shared, unlimited and filled at once, so a token is never computed twice, on any
worker. Figures:

    reused_share     share of tokens that are cached
    warm_load        utilization of the workers that compute only the rest
    fifo_ratio       p90 of the time to first token, oldest first / the base's
    shortest_ratio   the same, if the prompt with the least work left preempts the others
    own_ratio        the same, without any queueing

No router is below `own_ratio`. None that starts prompts in order is below `fifo_ratio`, if the
router it is compared with is as good as the base: no hits, and no idle worker while prompts wait.
"""

import argparse
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, quantiles

from baton.workload import BLOCK_TOKENS, Planned
from bench.arguments import trace_file
from bench.report import Value, render


@dataclass(frozen=True)
class Job:
    """Prompt: its arrival, its total work, and the work of its uncached part, in token units."""

    at: float
    whole: float
    rest: float


def jobs_of(trace: Sequence[Planned], attention_tokens: int) -> list[Job]:
    """Return the jobs of a trace, at the trace's own pace."""
    known: set[int] = set()
    jobs = []
    for planned in trace:
        blocks = planned.blocks[: planned.prompt_tokens // BLOCK_TOKENS]
        num_known = next(
            (place for place, block in enumerate(blocks) if block not in known), len(blocks)
        )
        known.update(blocks)
        there = min(
            num_known * BLOCK_TOKENS, planned.prompt_tokens - 1
        )  # the last token is always computed
        whole = work_of(planned.prompt_tokens, attention_tokens)
        jobs.append(Job(planned.at_s, whole, whole - work_of(there, attention_tokens)))
    return jobs


def work_of(num_tokens: int, attention_tokens: int) -> float:
    """Return the work of the first `num_tokens` tokens of a prompt."""
    return num_tokens + (num_tokens**2 / (2 * attention_tokens) if attention_tokens else 0)


def in_order(arrivals: Sequence[float], works: Sequence[float], num_servers: int) -> list[float]:
    """Return the times from arrival to end, if the oldest job starts when a server is free."""
    free = [0.0] * num_servers
    taken = []
    for at, work in zip(arrivals, works, strict=True):
        end = max(at, heapq.heappop(free)) + work
        heapq.heappush(free, end)
        taken.append(end - at)
    return taken


def shortest_first(
    arrivals: Sequence[float], works: Sequence[float], num_servers: int
) -> list[float]:
    """Return the times from arrival to end, if jobs with the least work left run first."""
    taken = [0.0] * len(works)
    left = list[tuple[float, int]]()
    now = 0.0
    num_arrived = 0
    while left or num_arrived < len(works):
        if not left:
            now = max(now, arrivals[num_arrived])
        while num_arrived < len(works) and arrivals[num_arrived] <= now:
            left.append((works[num_arrived], num_arrived))
            num_arrived += 1
        left.sort()
        until_next = arrivals[num_arrived] - now if num_arrived < len(works) else left[0][0]
        step = min(left[0][0], until_next)
        served = [(work - step, index) for work, index in left[:num_servers]]
        now += step
        for work, index in served:
            if work <= 0:
                taken[index] = now - arrivals[index]
        left = [each for each in served if each[0] > 0] + left[num_servers:]
    return taken


def bounds(jobs: Sequence[Job], load: float, num_servers: int) -> dict[str, Value]:
    whole = [job.whole for job in jobs]
    rest = [job.rest for job in jobs]
    pace = fmean(whole) * len(jobs) / (load * num_servers) / max(jobs[-1].at, 1e-9)
    arrivals = [job.at * pace for job in jobs]
    base = _p90(in_order(arrivals, whole, num_servers))
    return {
        "load": load,
        "warm_load": load * sum(rest) / sum(whole),
        "fifo_ratio": _p90(in_order(arrivals, rest, num_servers)) / base,
        "shortest_ratio": _p90(shortest_first(arrivals, rest, num_servers)) / base,
        "own_ratio": _p90(rest) / base,
    }


def _p90(samples: Sequence[float]) -> float:
    return quantiles(samples, n=10, method="inclusive")[8]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=trace_file)
    parser.add_argument(
        "--requests", type=int, help="number of requests from the start of the trace; default: all"
    )
    parser.add_argument(
        "--attention-tokens",
        type=int,
        default=0,
        help="preceding tokens that add one unit to a token; 0: attention is free; default 0",
    )
    parser.add_argument("--servers", type=int, default=2, help="number of workers; default 2")
    parser.add_argument(
        "--load", type=float, default=0.73, help="share of the capacity in use; default 0.73"
    )
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    trace = flags.trace[: flags.requests]
    tokens = sum(planned.prompt_tokens for planned in trace)
    plain = jobs_of(trace, 0)
    print(
        render(
            "cache_bound",
            {
                "requests": len(trace),
                "reused_share": 1 - sum(job.rest for job in plain) / tokens,
                **bounds(jobs_of(trace, flags.attention_tokens), flags.load, flags.servers),
            },
            as_json=flags.json,
        )
    )


if __name__ == "__main__":
    main()
