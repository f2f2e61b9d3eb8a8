"""`python -m bench.resume`: time of a request that moves to another decode pool with its output.

The pool computes the known tokens again before it samples the next one. A model with recurrent
layers takes the one-step form for them. One pool computes one token of them per step, the other
many; they have the same weights and take turns. The ratio is time with many / with one, to the
first new token, by shortest turns. The prompt's memory has the content of an earlier request, because
that takes no time.
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path

import torch

from baton.cluster_config import demo_model
from bench.report import OtherLoad, Value, render
from engine.core.request import Request, SamplingParams
from engine.memory.heap import keep_freed_memory
from engine.memory.leases import pages_for_tokens
from models.loader import read_model
from tests.support.pool.local_pool import Answer, LocalPool, call, local_pool

PAGE_SIZE = 64
MAX_REPLAYED = 64  # as in worker processes


def resume_s(pool: LocalPool, prompt_tokens: int, num_known: int) -> float:
    """Return the seconds from the arrival of a request with known output to its next token."""
    answer = Answer()
    prompt = tuple(range(3, 3 + prompt_tokens))
    request = Request("r", prompt, num_known + 1, SamplingParams(temperature=0))
    began_s = time.perf_counter()

    def submit() -> None:
        known = [5] * (num_known - 1)
        key = pool.scheduler.reserve(request, answer.emit, replayed=known).key
        pool.scheduler.join(key, 5)

    call(pool.loop, submit)
    assert answer.done.wait(600), "a request did not end"
    assert len(answer.tokens) == 1
    return time.perf_counter() - began_s


def fill(pool: LocalPool, prompt_tokens: int, num_tokens: int) -> None:
    """Let a request use the memory of the only slot and of all pages."""
    prompt = tuple(range(3, 3 + prompt_tokens))
    pool.generate([Request("r", prompt, num_tokens, SamplingParams(temperature=0))])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, default=demo_model(), help="model directory; default: the demo model"
    )
    parser.add_argument(
        "--known",
        type=int,
        nargs="+",
        default=[64, 256, 1024],
        help="numbers of known tokens; default 64 256 1024",
    )
    for name, default in (("threads", 1), ("rounds", 5), ("prompt", 100)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    flags = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(flags.threads)
    model, others = read_model(flags.model), OtherLoad()
    longest = max(flags.known) + 1
    pool = partial(
        local_pool,
        model,
        page_size=PAGE_SIZE,
        num_pages=2 + pages_for_tokens(flags.prompt + longest, PAGE_SIZE),
        max_running=1,
    )
    values: dict[str, Value] = {"threads": flags.threads, "prompt": flags.prompt}
    with pool(replay_tokens=1) as one, pool(replay_tokens=MAX_REPLAYED) as many:
        for each in (one, many):
            fill(each, flags.prompt, longest)
        for known in flags.known:
            turns = [
                [resume_s(each, flags.prompt, known) for each in (one, many)]
                for _ in range(1 + flags.rounds)
            ][1:]
            one_s, many_s = (min(taken) for taken in zip(*turns, strict=True))
            values |= {
                f"known_{known}_one_ms": round(1e3 * one_s, 2),
                f"known_{known}_many_ms": round(1e3 * many_s, 2),
                f"known_{known}_ratio": round(many_s / one_s, 4),
            }
    print(render("resume", {**values, **others.figures()}, as_json=flags.json))
    return 0


if __name__ == "__main__":
    sys.exit(main())
