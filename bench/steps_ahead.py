"""`python -m bench.steps_ahead`: decode with `--overlap-steps` against decode without, in one
process.

Two pools of one stage have the same weights, and there is no gRPC. They take turns. Each turn
starts `rows` requests on one of them. It counts the time of its steps between the last request's
first token and the first request's last one. A ratio is time without steps ahead / with them, so
above 1 they are faster. One is the median over turns; the other, of the shortest turns, is the
better figure on a busy machine.

With `--device-ms` no layer computes: each forward sleeps and releases the interpreter, as on a
device. That shows the share of a step's planning that is hidden.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch

from baton.cluster_config import demo_model
from bench.engine_sides import MODEL
from bench.report import OtherLoad, Value, render
from engine.contracts.model import StageOutput
from engine.core.batch import ForwardBatch, plan_where_needed
from engine.core.request import Request, SamplingParams
from engine.memory.heap import keep_freed_memory
from engine.memory.leases import pages_for_tokens
from engine.pipeline.stage_executor import StageExecutor
from engine.sampling.sampler import wanted_tokens
from models.loader import ModelDescription, random_model, read_model
from tests.support.pool.local_pool import Answer, LocalPool, call, local_pool

PAGE_SIZE = 64


@dataclass
class Stamped(Answer):
    """Response that records the time of each token."""

    came_s: list[float] = field(default_factory=list)

    def emit(self, event: Any) -> None:  # noqa: ANN401 - decode's, which benchmarks do not import
        super().emit(event)
        if len(self.came_s) < len(self.tokens):
            self.came_s.append(time.perf_counter())


def step_s(pool: LocalPool, rows: int, prompt_tokens: int, num_tokens: int) -> float:
    """Return the mean seconds of a step in which all rows take part."""
    rng = random.Random(0)
    answers = [Stamped() for _ in range(rows)]

    def submit() -> None:
        for row, answer in enumerate(answers):
            prompt = tuple(rng.randrange(3, 200) for _ in range(prompt_tokens))
            pool.scheduler.submit_local(
                Request(f"r{row}", prompt, num_tokens, SamplingParams(temperature=0)), answer.emit
            )

    call(pool.loop, submit)
    for answer in answers:
        assert answer.done.wait(600), "a request did not end"
    first_s = max(each.came_s[0] for each in answers)
    last_s = min(each.came_s[-1] for each in answers)
    steps = sum(first_s < came_s <= last_s for came_s in answers[0].came_s)
    return (last_s - first_s) / steps


def waiting_forward(seconds: float, vocab_size: int) -> Callable[..., StageOutput]:
    """Return a stand-in for `StageExecutor._forward` that plans as it does, then sleeps."""

    def forward(self: StageExecutor, batch: ForwardBatch, *others: object) -> StageOutput:
        self.num_plans += plan_where_needed(batch, self._planner)
        time.sleep(seconds)
        return StageOutput(logits=torch.zeros(len(wanted_tokens(batch)), vocab_size))

    return forward


@contextmanager
def pools(
    description: ModelDescription, rows: int, num_tokens: int
) -> Iterator[tuple[LocalPool, LocalPool]]:
    """Yield the pools without steps ahead, and with them."""
    pool = partial(
        local_pool,
        description,
        page_size=PAGE_SIZE,
        max_running=rows,
        chunk_tokens=512,
        num_pages=1 + rows * (1 + pages_for_tokens(num_tokens, PAGE_SIZE)),
    )
    with pool() as plain, pool(steps_ahead=True) as ahead:
        yield plain, ahead


def measure(
    description: ModelDescription, rows: int, flags: argparse.Namespace
) -> dict[str, Value]:
    """Return the milliseconds of a step and the ratio."""
    with pools(description, rows, flags.context + flags.steps) as both:
        turns = [
            [step_s(pool, rows, flags.context, flags.steps) for pool in both]
            for _ in range(1 + flags.rounds)
        ][1:]
    return {
        f"b{rows}_ms": round(1e3 * median(plain for plain, _ in turns), 3),
        f"b{rows}_ahead_ms": round(1e3 * median(ahead for _, ahead in turns), 3),
        f"b{rows}_ratio": round(median(plain / ahead for plain, ahead in turns), 3),
        f"b{rows}_shortest_ratio": round(
            min(plain for plain, _ in turns) / min(ahead for _, ahead in turns), 3
        ),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, default=demo_model(), help="model directory; default: the demo model"
    )
    parser.add_argument(
        "--shape", action="store_true", help="use random weights of Qwen3-0.6B's shape instead"
    )
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 8, 32], help="numbers of rows; default 1 8 32"
    )
    for name, default in (("threads", 1), ("rounds", 9), ("steps", 100), ("context", 128)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument(
        "--device-ms",
        type=float,
        default=0,
        help="simulated milliseconds of each forward; 0: compute it",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    flags = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(flags.threads)
    description = random_model(MODEL) if flags.shape else read_model(flags.model)
    waits = (
        nullcontext()
        if not flags.device_ms
        else mock.patch.object(
            StageExecutor,
            "_forward",
            waiting_forward(flags.device_ms / 1e3, description.facts.vocab_size),
        )
    )
    others = OtherLoad()
    with waits:
        values = [measure(description, rows, flags) for rows in flags.rows]
    print(
        render(
            "steps_ahead",
            {
                "threads": flags.threads,
                "context": flags.context,
                "device_ms": flags.device_ms,
                **{key: value for each in values for key, value in each.items()},
                **others.figures(),
            },
            as_json=flags.json,
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
