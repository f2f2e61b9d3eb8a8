"""What a load consists of: when requests arrive and how long they are, drawn or replayed from a trace.

    Arrivals(Process.BURST, rate=4, burst=8).times(100, random.Random(0))
    Lengths.parse("uniform:96-288").draw(rng)
    read_trace(Path("trace.jsonl"), speed=2.0)
"""

import itertools
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Self

from baton.values import ModelInfo, Query, Sampling, Stop
from runtime.errors import ConfigError

MAX_LENGTH = 1 << 20
MAX_BLOCK = (1 << 64) - 1


class Process(StrEnum):
    """How requests are spread over time."""

    POISSON = "poisson"  # independent of one another
    CONSTANT = "constant"  # evenly spaced
    BURST = "burst"  # so many at once, the bursts evenly spaced


@dataclass(frozen=True)
class Arrivals:
    """`rate` is the mean number of requests per second, of every process."""

    process: Process = Process.POISSON
    rate: float = 4.0
    burst: int = 8

    def times(self, count: int, rng: random.Random) -> list[float]:
        """Seconds after the start, in order."""
        if self.process is Process.CONSTANT:
            return [index / self.rate for index in range(count)]
        if self.process is Process.BURST:
            return [index // self.burst * self.burst / self.rate for index in range(count)]
        at, times = 0.0, []
        for _ in range(count):
            at += rng.expovariate(self.rate)
            times.append(at)
        return times


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts; every draw is at least 1."""

    kind: str
    first: float
    second: float = 0.0

    @classmethod
    def parse(cls, text: str, *, field: str = "length") -> Self:
        """"192", "uniform:96-288", "normal:192,48" (mean, deviation) or "exponential:192" (mean).

        Raises ConfigError naming `field`.
        """
        kind, colon, rest = text.partition(":")
        kind, rest = (kind, rest) if colon else ("constant", text)
        separators = {"constant": "", "uniform": "-", "normal": ",", "exponential": ""}
        try:
            separator = separators[kind]
            numbers = [float(part) for part in (rest.split(separator) if separator else [rest])]
            first, second = numbers if separator else (*numbers, 0.0)
        except (KeyError, ValueError):
            raise ConfigError(f"{field} must be like 192, uniform:96-288, normal:192,48 or exponential:192, "
                              f"got {text!r}", field=field) from None
        if not 1 <= first <= MAX_LENGTH or not 0 <= second <= MAX_LENGTH or (kind == "uniform" and second < first):
            raise ConfigError(f"{field} must be from 1 to {MAX_LENGTH} and in order, got {text!r}", field=field)
        return cls(kind, first, second)

    def draw(self, rng: random.Random) -> int:
        match self.kind:
            case "uniform":
                return rng.randint(round(self.first), round(self.second))
            case "normal":
                return max(1, round(rng.gauss(self.first, self.second)))
            case "exponential":
                return max(1, round(rng.expovariate(1 / self.first)))
            case _:
                return round(self.first)


@dataclass(frozen=True)
class Planned:
    """One request to come. `blocks` are the names of its prompt's blocks in a trace: as long as they are equal, two
    prompts are."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Shape:
    """The lengths of prompts and answers."""

    prompt: Lengths
    output: Lengths


def plan(count: int, arrivals: Arrivals, shape: Shape, *, seed: int) -> list[Planned]:
    """The same seed gives the same requests at the same times."""
    rng = random.Random(seed)
    return [Planned(at_s, shape.prompt.draw(rng), shape.output.draw(rng)) for at_s in arrivals.times(count, rng)]


def read_trace(path: Path, *, speed: float = 1.0) -> list[Planned]:
    """One JSON object per line, in order of time: `at_s`, `prompt_tokens`, `output_tokens`; or `timestamp` (ms),
    `input_length`, `output_length` and `hash_ids`, as Mooncake's published traces have them. `speed` 2 replays twice as
    fast.

    Raises ConfigError naming the line.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}", field="trace") from error
    planned = [_trace_line(line, f"{path}:{number}", speed) for number, line in enumerate(lines, 1) if line.strip()]
    if not planned:
        raise ConfigError(f"the trace {path} has no requests", field="trace")
    if any(after.at_s < before.at_s for before, after in itertools.pairwise(planned)):
        raise ConfigError(f"the trace {path} is not in order of time", field="trace")
    return [replace(item, at_s=item.at_s - planned[0].at_s) for item in planned]


def _trace_line(line: str, where: str, speed: float) -> Planned:
    try:
        values = json.loads(line)
        at_s = float(values["at_s"]) if "at_s" in values else float(values["timestamp"]) / 1e3
        prompt, output = (int(values[ours] if ours in values else values[theirs]) for ours, theirs in (
            ("prompt_tokens", "input_length"), ("output_tokens", "output_length")))
        blocks = tuple(map(int, values.get("hash_ids", ())))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{where}: needs at_s, prompt_tokens and output_tokens ({error!r})", field="trace") from None
    if not 0 <= at_s < math.inf or not 1 <= prompt <= MAX_LENGTH or not 1 <= output <= MAX_LENGTH:
        raise ConfigError(f"{where}: at_s must be finite and not negative, lengths must be from 1 to {MAX_LENGTH}",
                          field="trace")
    if any(not 0 <= block <= MAX_BLOCK for block in blocks):
        raise ConfigError(f"{where}: hash_ids must be from 0 to {MAX_BLOCK}", field="trace")
    return Planned(at_s / speed, prompt, output, blocks)


def superposed(planned: Sequence[Planned], copies: int, *, seed: int) -> list[Planned]:
    """A load in order of time, so many times at once: as many users with as much to ask, each copy with blocks of its
    own and beginning somewhere else in the load, so that bursts do not meet. Its length and the first copy stay."""
    rng, end_s = random.Random(seed), max((item.at_s for item in planned), default=0.0)
    step = 1 + max((block for item in planned for block in item.blocks), default=0)
    together = list(planned)
    for copy in range(1, copies):
        later_s = rng.uniform(0.0, end_s)
        together += [replace(item, at_s=(item.at_s + later_s) % end_s if end_s else 0.0,
                             blocks=tuple(block + copy * step for block in item.blocks)) for item in planned]
    return sorted(together, key=lambda item: item.at_s)


def make_queries(info: ModelInfo, planned: Sequence[Planned], *, seed: int) -> list[Query]:
    """Prompts of random ordinary tokens, for any model. Each generates exactly its tokens; what is longer than the
    model's context is cut."""
    rng = random.Random(seed)
    ordinary = [token for token in range(info.vocab_size) if token not in info.eos_token_ids]
    queries = []
    for index, item in enumerate(planned):
        output = min(item.output_tokens, info.max_context_tokens - 1)
        prompt = min(item.prompt_tokens, info.max_context_tokens - output)
        queries.append(Query(tuple(rng.choices(ordinary, k=prompt)), Sampling(seed=index),
                             Stop(max_tokens=output, ignore_eos=True), skip_text=True))
    return queries
