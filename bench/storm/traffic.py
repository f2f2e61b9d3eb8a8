"""Load of a storm: open-loop arrivals, and clients that misbehave."""

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

from baton.values import (
    Chunk,
    Completion,
    Event,
    Finish,
    FinishReason,
    ModelInfo,
    Query,
    Sampling,
    Stop,
    StructuredOutput,
)
from baton.wire import completions_of
from runtime.errors import BatonError
from tests.support.cluster.queries import comparable, random_query

HUNG_S = 10.0  # beyond its deadline; a request that takes longer counts as hung
# more than the windows of a connection hold
UNREAD_TOKENS = 700
UNREAD_LOGPROBS = 20
LITTLE_URGENT = 10  # a priority that routers preempt for others
UNREAD_S = 12.0  # stay of a client that does not read; a router disconnects it in the meantime


class Manner(StrEnum):
    """Behavior of a client."""

    PATIENT = "patient"  # reads to the end
    ABORTING = "aborting"  # within a second: it disconnects, or calls `Abort`
    UNREAD = "unread"  # stays and stops reading
    HOSTILE = "hostile"  # sends a schema that is expensive on purpose


@dataclass(frozen=True)
class Shares:
    """Shares of all arrivals; the rest is patient."""

    aborting: float = 0.6
    unread: float = 0.02
    hostile: float = 0.02

    def draw(self, rng: random.Random) -> Manner:
        weights = (
            1 - self.aborting - self.unread - self.hostile,
            self.aborting,
            self.unread,
            self.hostile,
        )
        return rng.choices(list(Manner), weights)[0]


@dataclass(frozen=True)
class PlannedRequest:
    """Planned request; `patience_s` is when an aborting client gives up."""

    at_s: float
    question: int
    manner: Manner
    patience_s: float


@dataclass
class Seen:
    """Observations of a request's client, with times of `time.monotonic`.

    `error` is the reason of its error, None if it finished or its client disconnected.
    """

    coming: PlannedRequest
    sent_s: float = 0.0
    ended_s: float | None = None
    message_s: list[float] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    has_finished: bool = False  # all choices
    is_hung: bool = False
    error: str | None = None
    text: str = ""

    @property
    def response(self) -> tuple[Completion, ...]:
        """Return the whole response, if it has finished."""
        return tuple(map(comparable, completions_of(self.events)))

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that arrived, of all choices."""
        return sum(len(event.token_ids) for event in self.events if isinstance(event, Chunk))

    @property
    def is_aborted(self) -> bool:
        """Return whether its client called `Abort`, and all choices ended by that or before."""
        finishes = [event for event in self.events if isinstance(event, Finish)]
        return self.has_finished and any(
            finish.reason is FinishReason.ABORTED for finish in finishes
        )

    @property
    def num_cached(self) -> int:
        """Return the number of tokens of its prompt that were cached."""
        finishes = [event for event in self.events if isinstance(event, Finish)]
        return max([finish.usage.cached_tokens for finish in finishes], default=0)


def make_questions(
    info: ModelInfo,
    count: int,
    *,
    seed: int,
    adapters: Sequence[str] = (),
    has_all_features: bool = False,
) -> list[Query]:
    """Return prompts of random ordinary tokens, for the model and each adapter in turn.

    Every third prompt begins like the one before it. Every other one is sampled with penalties, the
    rest is greedy; with `has_all_features` the seed draws what they ask for. Every fifth is so
    little urgent that it pauses for others. All request logprobs.
    """
    rng = random.Random(seed)
    ordinary = [token for token in range(info.vocab_size) if token not in info.eos_token_ids]
    prompts: list[tuple[int, ...]] = []
    for index in range(count):
        begin = prompts[-1][: rng.randrange(len(prompts[-1]))] if index % 3 == 2 else ()
        prompts.append((*begin, *rng.choices(ordinary, k=rng.randint(8, 160))))
    models = ("", *(f":{name}" for name in adapters))
    return [
        replace(
            _any_question(rng, prompt)
            if has_all_features
            else _plain_question(rng, prompt, is_sampled=index % 2 == 1),
            model=models[index % len(models)],
            priority=LITTLE_URGENT if index % 5 == 4 else 0,
        )
        for index, prompt in enumerate(prompts)
    ]


def _plain_question(rng: random.Random, prompt: Sequence[int], *, is_sampled: bool) -> Query:
    greedy = Sampling(temperature=0.0)
    sampled = Sampling(0.9, top_p=0.95, top_k=50, repetition_penalty=1.1, seed=rng.randrange(2**63))
    return Query(
        tuple(prompt),
        sampled if is_sampled else greedy,
        Stop(max_tokens=rng.randint(24, 72), ignore_eos=True),
        num_top_logprobs=0,
        skip_text=True,
    )


def _any_question(rng: random.Random, prompt: Sequence[int]) -> Query:
    drawn = random_query(rng, prompt, models=("",), max_tokens=rng.choice((2, 24, 72)))
    return replace(
        drawn,
        num_top_logprobs=drawn.num_top_logprobs or 0,
        cache_salt=rng.choice(("", "", "salt")),
        session_id=rng.choice(("", "one", "two")),
        retention_s=rng.choice((None, None, 0.0, 3600.0)),
        ends_session=rng.random() < 0.1,
        prefix_cache=rng.choice((None, None, False)),
        speculate=rng.choice((None, None, False)),
    )


def plan(
    seconds: float, rate: float, num_questions: int, shares: Shares, *, seed: int
) -> list[PlannedRequest]:
    """Return evenly spaced requests, so that latencies vary with faults and not with arrivals."""
    rng = random.Random(seed)
    return [
        PlannedRequest(index / rate, rng.randrange(num_questions), shares.draw(rng), rng.random())
        for index in range(int(seconds * rate))
    ]


def hostile_schemas() -> list[str]:
    """Return short schemas that cost minutes to compile, or seconds per mask, without limits."""
    primes = {
        "allOf": [{"type": "integer", "multipleOf": prime} for prime in (7, 11, 13, 17, 19, 23)]
    }
    names = [f"d{number}" for number in range(60)]
    lists = {
        name: {
            "type": "array",
            "items": {"anyOf": [{"$ref": f"#/$defs/{other}"} for other in names[at % 7 :: 7]]},
        }
        for at, name in enumerate(names)
    }
    deep: dict[str, object] = {"type": "integer"}
    for _ in range(200):
        deep = {"type": "array", "items": deep}
    return [
        json.dumps(schema)
        for schema in (
            primes,
            deep,
            {"$defs": lists, "anyOf": [{"$ref": f"#/$defs/{name}"} for name in names]},
        )
    ]


class Asker(Protocol):
    """Client that sends the requests, such as an `AsyncBatonClient`."""

    def generate(
        self, query: Query, *, timeout_s: float | None = None
    ) -> AsyncGenerator[Event, None]: ...

    async def abort(self, request_ids: Iterable[str]) -> tuple[str, ...]: ...


class Traffic:
    """Sender of planned requests, each with `timeout_s`; `seen` grows meanwhile.

    The `askers` take turns.
    """

    def __init__(
        self, askers: Sequence[Asker], questions: Sequence[Query], timeout_s: float
    ) -> None:
        self._askers = askers
        self._questions = questions
        self._timeout_s = timeout_s
        self.seen: list[Seen] = []

    async def run(self, planned: Sequence[PlannedRequest], start_s: float) -> None:
        """Send all requests; return when all have ended."""
        await asyncio.gather(
            *(self._one(index, coming, start_s) for index, coming in enumerate(planned))
        )

    async def _one(self, index: int, coming: PlannedRequest, start_s: float) -> None:
        await asyncio.sleep(max(start_s + coming.at_s - time.monotonic(), 0.0))
        seen = Seen(coming, sent_s=time.monotonic())
        self.seen.append(seen)
        calls_abort = coming.manner is Manner.ABORTING and index % 2 == 1
        limits_s = {Manner.UNREAD: UNREAD_S}
        if not calls_abort:
            limits_s[Manner.ABORTING] = coming.patience_s
        asker, query = self._askers[index % len(self._askers)], self._query(index, coming)
        try:
            async with (
                asyncio.timeout(limits_s.get(coming.manner, self._timeout_s + HUNG_S)),
                self._abort(asker, query, coming.patience_s if calls_abort else None),
            ):
                await self._read(asker, seen, query)
        except TimeoutError:
            seen.is_hung = coming.manner not in limits_s
        except BatonError as error:
            seen.error, seen.text = error.reason, str(error)
        seen.ended_s = time.monotonic()

    def _query(self, index: int, coming: PlannedRequest) -> Query:
        query = replace(self._questions[coming.question], request_id=f"storm-{index}")
        match coming.manner:
            case Manner.UNREAD:
                return replace(
                    query,
                    stop=Stop(max_tokens=UNREAD_TOKENS, ignore_eos=True),
                    num_top_logprobs=UNREAD_LOGPROBS,
                )
            case Manner.HOSTILE:
                schemas = hostile_schemas()
                return replace(
                    query,
                    structured_output=StructuredOutput(schemas[coming.question % len(schemas)]),
                    stop=Stop(max_tokens=24),
                )
        return query

    @asynccontextmanager
    async def _abort(
        self, asker: Asker, query: Query, after_s: float | None
    ) -> AsyncIterator[None]:
        """Call `Abort` for a request in the block, `after_s` its begin; never if that is None."""

        async def abort(delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            with suppress(BatonError):  # no router can be reached
                await asker.abort([query.request_id])

        if after_s is None:
            yield
            return
        task = asyncio.create_task(abort(after_s))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _read(self, asker: Asker, seen: Seen, query: Query) -> None:
        async with aclosing(asker.generate(query, timeout_s=self._timeout_s)) as events:
            async for event in events:
                seen.message_s.append(time.monotonic())
                seen.events.append(event)
                if seen.coming.manner is Manner.UNREAD:
                    await asyncio.sleep(UNREAD_S + 1)  # the time limit ends the request
        seen.has_finished = True
