"""Arrivals and lengths of the requests of a load. `baton.traces` reads those of a trace.

Arrivals(Process.BURST, rate=4, burst=8).times(100, random.Random(0))
Lengths.parse("uniform:96-288").draw(rng)
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Self

from baton.values import ModelInfo, Query, Sampling, Stop
from runtime.errors import ConfigError

MAX_LENGTH = 1 << 20
MAX_BLOCK = (1 << 64) - 1
BLOCK_TOKENS = 512  # of a trace's blocks
NOTHING: Mapping[int, list[int]] = MappingProxyType({})


class Process(StrEnum):
    """Distribution of arrivals over time."""

    POISSON = "poisson"  # independent of one another
    CONSTANT = "constant"  # evenly spaced
    BURST = "burst"  # several at once, with evenly spaced bursts


@dataclass(frozen=True)
class Arrivals:
    """Arrival process; `rate` is the mean number of requests per second."""

    process: Process = Process.POISSON
    rate: float = 4.0
    burst: int = 8

    def times(self, count: int, rng: random.Random) -> list[float]:
        """Return the arrivals in order, in seconds after the start."""
        if self.process is Process.CONSTANT:
            return [index / self.rate for index in range(count)]
        if self.process is Process.BURST:
            return [index // self.burst * self.burst / self.rate for index in range(count)]
        at = 0.0
        times = []
        for _ in range(count):
            at += rng.expovariate(self.rate)
            times.append(at)
        return times


@dataclass(frozen=True)
class Lengths:
    """Distribution of token counts; every sample is at least 1."""

    kind: str
    first: float
    second: float = 0.0

    @classmethod
    def parse(cls, text: str, *, field: str = "length") -> Self:
        """Parse "192", "uniform:96-288", "normal:192,48" (mean, deviation) or "exponential:192"
        (mean).

        Raises:
            ConfigError: none of these; names `field`.
        """
        kind, colon, rest = text.partition(":")
        kind, rest = (kind, rest) if colon else ("constant", text)
        separators = {"constant": "", "uniform": "-", "normal": ",", "exponential": ""}
        try:
            separator = separators[kind]
            numbers = [float(part) for part in (rest.split(separator) if separator else [rest])]
            first, second = numbers if separator else (*numbers, 0.0)
        except (KeyError, ValueError):
            raise ConfigError(
                f"{field} must be like 192, uniform:96-288, normal:192,48 or "
                f"exponential:192, got {text!r}",
                field=field,
            ) from None
        if (
            not 1 <= first <= MAX_LENGTH
            or not 0 <= second <= MAX_LENGTH
            or (kind == "uniform" and second < first)
        ):
            raise ConfigError(
                f"{field} must be from 1 to {MAX_LENGTH} and in order, got {text!r}", field=field
            )
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
class Turn:
    """The place of a request in a recorded conversation.

    The request is sent `pause_s` after the last response to the turns in `after`. If there are
    none, it is sent at its planned time.
    """

    session: int  # the conversation
    number: int = 0  # in the conversation, from 0
    after: tuple[int, ...] = ()  # numbers of earlier turns
    pause_s: float = 0.0


@dataclass(frozen=True)
class Planned:
    """Planned request. `blocks` names the blocks of its prompt in a trace.

    Two prompts are equal up to the first block that differs. `client` is the name of its client in a
    simulation. With a `turn`, `at_s` is the time of sending in the recording.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    client: str = ""
    turn: Turn | None = None
    block_tokens: int = BLOCK_TOKENS


@dataclass(frozen=True)
class Shape:
    """Lengths of prompts and responses."""

    prompt: Lengths
    output: Lengths


@dataclass(frozen=True)
class TurnShape:
    """Conversations of `count` turns.

    Each later turn adds the response before it and `new` tokens to the prompt, `pause_s` after that
    response.
    """

    count: int
    new: Lengths
    pause_s: float = 0.0

    def draw(
        self, planned: Sequence[Planned], max_context_tokens: int, *, seed: int
    ) -> list[tuple[int, ...]]:
        """Return the numbers of new tokens of the later turns of each conversation.

        Raises:
            ConfigError: a conversation is longer than the context.
        """
        rng = random.Random(f"turns {seed}")
        drawn = [tuple(self.new.draw(rng) for _ in range(self.count - 1)) for _ in planned]
        longest = max(
            item.prompt_tokens + self.count * item.output_tokens + sum(new)
            for item, new in zip(planned, drawn, strict=True)
        )
        if longest > max_context_tokens:
            raise ConfigError(
                f"the longest conversation of {self.count} turns has {longest} tokens, the context "
                f"{max_context_tokens}: fewer --turns, or shorter --turn-tokens or --output-tokens",
                field="turns",
            )
        return drawn


def plan(count: int, arrivals: Arrivals, shape: Shape, *, seed: int) -> list[Planned]:
    """Return the requests of a load; the same seed gives the same requests at the same times."""
    rng = random.Random(seed)
    return [
        Planned(at_s, shape.prompt.draw(rng), shape.output.draw(rng))
        for at_s in arrivals.times(count, rng)
    ]


class TooLong(StrEnum):
    """Action for requests whose prompt and output are longer than the context of the model."""

    REFUSE = "refuse"  # reject the whole load
    SKIP = "skip"
    CUT = "cut"  # the prompt, and then the output if that is not enough


@dataclass(frozen=True)
class Fitted:
    """Load whose requests all fit, with the number of cut and skipped requests."""

    planned: tuple[Planned, ...]
    num_cut: int = 0
    num_skipped: int = 0


def changes(*, cut: int, skipped: int, unanswered: int, max_context_tokens: int) -> Iterator[str]:
    """Yield lines of text about requests that are not sent as planned."""
    context = f"the context of {max_context_tokens} tokens"
    if cut:
        yield f"requests cut to {context}: {cut}"
    if skipped:
        yield f"requests skipped as longer than {context}: {skipped}"
    if unanswered:
        yield f"requests skipped as the trace has no response to them: {unanswered}"


def fitted(planned: Sequence[Planned], max_context_tokens: int, too_long: TooLong) -> Fitted:
    """Make a load fit the context.

    Raises:
        ConfigError: requests are too long and `too_long` is REFUSE, or no request is left.
    """
    long = [item for item in planned if _is_long(item, max_context_tokens)]
    if not long:
        return Fitted(tuple(planned))
    if too_long is TooLong.REFUSE:
        most = max(item.prompt_tokens + item.output_tokens for item in long)
        raise ConfigError(
            f"{len(long)} of {len(planned)} requests are longer than the context of "
            f"{max_context_tokens} tokens, the longest has {most}: --too-long skip leaves them "
            "out, --too-long cut shortens them",
            field="too_long",
        )
    if too_long is TooLong.CUT:
        return Fitted(tuple(_cut(item, max_context_tokens) for item in planned), num_cut=len(long))
    kept = _without_long(planned, max_context_tokens)
    if not kept:
        raise ConfigError(
            f"none of the {len(planned)} requests fits into the context of {max_context_tokens} "
            "tokens",
            field="too_long",
        )
    return Fitted(kept, num_skipped=len(long))


def _is_long(item: Planned, max_context_tokens: int) -> bool:
    return item.prompt_tokens + item.output_tokens > max_context_tokens


def _without_long(planned: Sequence[Planned], max_context_tokens: int) -> tuple[Planned, ...]:
    """Return the requests that fit; the turns after the others wait for those before them."""
    before: dict[tuple[int, int], tuple[int, ...]] = {}  # of skipped turns
    kept = []
    for item in planned:
        turn = item.turn
        if turn is not None:
            after = dict.fromkeys(
                number
                for each in turn.after
                for number in before.get((turn.session, each), (each,))
            )
            turn = replace(turn, after=tuple(after))
        if not _is_long(item, max_context_tokens):
            kept.append(item if turn == item.turn else replace(item, turn=turn))
        elif turn is not None:
            before[turn.session, turn.number] = turn.after
    return tuple(kept)


def _cut(item: Planned, max_context_tokens: int) -> Planned:
    output = min(item.output_tokens, max_context_tokens - 1)
    return replace(
        item,
        prompt_tokens=min(item.prompt_tokens, max_context_tokens - output),
        output_tokens=output,
    )


def ordinary_tokens(info: ModelInfo) -> list[int]:
    """Return the ids that end no response."""
    return [token for token in range(info.vocab_size) if token not in info.eos_token_ids]


class Tokens:
    """Random ordinary tokens of a model, the same for the same seed."""

    def __init__(self, info: ModelInfo, seed: int) -> None:
        self._ordinary = ordinary_tokens(info)
        self._seed = seed

    def tail(
        self, item: Planned, index: int, begin: int = 0, known: Mapping[int, list[int]] = NOTHING
    ) -> list[int]:
        """Return the tokens of a prompt from `begin` on.

        Whole blocks from there on have those of `known`, or the same ones in every prompt. Other
        tokens belong to the request with this index in the load.
        """
        size = item.block_tokens
        count = item.prompt_tokens - begin
        own = self._drawn(f" {index}", count)
        tokens = own[: -begin % size]
        for block in item.blocks[-(-begin // size) : -(-item.prompt_tokens // size)]:
            tokens += known.get(block) or self._drawn(f"/{block}", size)
        return [*tokens, *own[len(tokens) :]][:count]

    def _drawn(self, name: str, count: int) -> list[int]:
        return random.Random(f"{self._seed}{name}").choices(self._ordinary, k=count)


def query_of(item: Planned, prompt: Sequence[int], index: int) -> Query:
    """Return the query of a planned request, whose response has exactly its tokens."""
    return Query(
        tuple(prompt),
        Sampling(seed=index),
        Stop(max_tokens=item.output_tokens, ignore_eos=True),
        skip_text=True,
    )


def make_queries(info: ModelInfo, planned: Sequence[Planned], *, seed: int) -> list[Query]:
    """Return queries with prompts of random ordinary tokens, for any model.

    A block of a trace always has the same tokens. Turns are not taken into account.
    """
    tokens = Tokens(info, seed)
    return [query_of(item, tokens.tail(item, index), index) for index, item in enumerate(planned)]
