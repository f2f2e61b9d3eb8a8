"""Open-loop load: arrivals do not depend on responses, except for later turns of conversations.

planned = plan(100, Arrivals(rate=4), shape, seed=0)
outcomes = await run_load(client, queries, [item.at_s for item in planned])  # in order of arrival
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, cast

from baton.load import Outcome
from baton.values import Event, Finish, ModelInfo, Query, Usage
from runtime.errors import BatonError

TIMEOUT_S = 60.0


class Endpoint(Protocol):
    """Target of a load: `AsyncBatonClient` or `AsyncVllmEngineClient`."""

    async def model_info(self) -> ModelInfo: ...

    def generate(
        self, query: Query, *, timeout_s: float | None = None
    ) -> AsyncGenerator[Event, None]: ...


class LoadConversation:
    """Requests of one user, one after the other.

    The prompt of a later turn is the one before it, its response, and the next of `new_token_ids`.
    With later turns the prompt of `first` must be token ids.
    """

    def __init__(self, first: Query, new_token_ids: Sequence[Sequence[int]] = ()) -> None:
        self._next = first
        self._new_token_ids = new_token_ids

    def requests(self, index: int, at_s: float, *, pause_s: float = 0.0) -> list["LoadRequest"]:
        """Return its requests; `index` is the place of the first one in the load."""
        return [
            LoadRequest(
                at_s,
                lambda: self._next,
                turn,
                session=index,
                after=(index + turn - 1,) if turn else (),
                pause_s=pause_s,
                on_response=partial(self._answered, turn),
            )
            for turn in range(1 + len(self._new_token_ids))
        ]

    def _answered(self, turn: int, query: Query, response: Sequence[int]) -> None:
        if turn < len(self._new_token_ids):
            assert isinstance(query.prompt, tuple)
            prompt = (*query.prompt, *response, *self._new_token_ids[turn])
            self._next = replace(query, prompt=cast(tuple[int, ...], prompt))


def always(query: Query) -> Callable[[], Query]:
    """Return a function that returns the query."""
    return lambda: query


def _ignored(query: Query, response: Sequence[int]) -> None:
    """Ignore a response."""


@dataclass(frozen=True)
class LoadRequest:
    """One request of a load.

    It is sent at `at_s`, or `pause_s` after the last response to the requests in `after`, which are
    places in the load. `query` is called then, and `on_response` with the query and the tokens of
    its response.
    """

    at_s: float
    query: Callable[[], Query]
    turn: int = 0
    session: int | None = None  # the requests of a conversation have the same
    after: tuple[int, ...] = ()
    pause_s: float = 0.0
    on_response: Callable[[Query, Sequence[int]], object] = _ignored


def named_sessions(requests: Sequence[LoadRequest], prefix: str) -> list[LoadRequest]:
    """Return the same load, in which the turns of each conversation name their session.

    The last ones end it.
    """
    last = {request.session: place for place, request in enumerate(requests)}

    def named(request: LoadRequest, place: int) -> Query:
        return replace(
            request.query(),
            session_id=f"{prefix}-{request.session}",
            ends_session=last[request.session] == place,
        )

    return [
        request
        if request.session is None
        else replace(request, query=partial(named, request, place))
        for place, request in enumerate(requests)
    ]


@dataclass
class Progress:
    """Progress of a run."""

    num_total: int
    num_sent: int = 0
    num_done: int = 0
    num_failed: int = 0
    num_tokens: int = 0

    @property
    def num_open(self) -> int:
        return self.num_sent - self.num_done - self.num_failed


async def run_load(
    client: Endpoint,
    queries: Sequence[Query],
    arrivals_s: Sequence[float],
    *,
    timeout_s: float = TIMEOUT_S,
    on_progress: Callable[[Progress], object] = lambda progress: None,
) -> list[Outcome]:
    """Send each query at its time and wait for all of them."""
    requests = [
        LoadRequest(at_s, always(query)) for at_s, query in zip(arrivals_s, queries, strict=True)
    ]
    return await run_requests(client, requests, timeout_s=timeout_s, on_progress=on_progress)


async def run_requests(
    client: Endpoint,
    requests: Sequence[LoadRequest],
    *,
    users: int | None = None,
    timeout_s: float = TIMEOUT_S,
    on_progress: Callable[[Progress], object] = lambda progress: None,
) -> list[Outcome]:
    """Send each request at its time or after its responses, and wait for all of them.

    Requests after a failed one are not sent. With `users` so many conversations go on at a time:
    the next one begins when another has ended. Return the outcomes of all requests that were sent,
    in their order.
    """
    run = _Run(client, requests, users, timeout_s, Progress(len(requests)), on_progress)
    outcomes = await asyncio.gather(*(run.hold(index) for index in range(len(requests))))
    return [outcome for outcome in outcomes if outcome is not None]


class _Run:
    """A load that is being sent. Times are seconds after its start."""

    def __init__(
        self,
        client: Endpoint,
        requests: Sequence[LoadRequest],
        users: int | None,
        timeout_s: float,
        progress: Progress,
        on_progress: Callable[[Progress], object],
    ) -> None:
        self._client = client
        self._requests = requests
        self._timeout_s = timeout_s
        self._progress = progress
        self._on_progress = on_progress
        self._start = time.monotonic()
        loop = asyncio.get_running_loop()
        # When each request was answered; None if it was not.
        self._answered_s = [loop.create_future() for _ in requests]
        self._seats = None if users is None else Seats(requests, users)

    async def hold(self, index: int) -> Outcome | None:
        """Send a request when it is due; return None if it is not sent."""
        request = self._requests[index]
        answered_s = None
        outcome = None
        try:
            due_s = await self._due_s(request)
            if due_s is None:
                self._progress.num_total -= 1
            else:
                await asyncio.sleep(max(self._start + due_s - time.monotonic(), 0.0))
                outcome = await self._sent(request, due_s)
                answered_s = None if outcome.error is not None else self._now()
        finally:
            if not self._answered_s[index].done():
                self._answered_s[index].set_result(answered_s)
            if self._seats is not None:
                self._seats.ended(request, self._now())
        self._on_progress(self._progress)
        return outcome

    async def _due_s(self, request: LoadRequest) -> float | None:
        """Return when a request is due, as soon as that is known; None if it is not sent."""
        if not request.after:
            return request.at_s if self._seats is None else await self._seats.due_s(request)
        ends_s = [await self._answered_s[place] for place in request.after]
        return None if None in ends_s else max(ends_s) + request.pause_s

    async def _sent(self, request: LoadRequest, due_s: float) -> Outcome:
        progress = self._progress
        progress.num_sent += 1
        response: list[int] = []
        query = request.query()
        outcome = await _measure(self._client, query, self._timeout_s, due_s, self._start, response)
        progress.num_done += outcome.error is None
        progress.num_failed += outcome.error is not None
        progress.num_tokens += outcome.num_tokens
        if outcome.error is None:
            request.on_response(query, response)
        return replace(outcome, turn=request.turn)

    def _now(self) -> float:
        return time.monotonic() - self._start


class Seats:
    """Places of a limited number of users, who begin one conversation after the other."""

    def __init__(self, requests: Sequence[LoadRequest], users: int) -> None:
        loop = asyncio.get_running_loop()
        self._num_open = Counter(map(self._session, requests))
        self._recorded_s = dict[object, float]()
        for request in requests:
            self._recorded_s.setdefault(self._session(request), request.at_s)
        self._begins_s = {session: loop.create_future() for session in self._num_open}
        self._waiting = iter(list(self._begins_s.values()))
        for _ in range(users):
            self._begin_next(0.0)

    async def due_s(self, request: LoadRequest) -> float:
        """Return when a request is due that follows no other, once its conversation has begun."""
        session = self._session(request)
        begins_s: float = await self._begins_s[session]
        return begins_s + max(request.at_s - self._recorded_s[session], 0.0)

    def ended(self, request: LoadRequest, now_s: float) -> None:
        """Note that a request has ended, or is not sent."""
        session = self._session(request)
        self._num_open[session] -= 1
        if not self._num_open[session]:
            self._begin_next(now_s)

    def _begin_next(self, now_s: float) -> None:
        following = next(self._waiting, None)
        if following is not None and not following.done():  # which it is if it was cancelled
            following.set_result(now_s)

    @staticmethod
    def _session(request: LoadRequest) -> object:
        return request if request.session is None else request.session


async def _measure(
    client: Endpoint,
    query: Query,
    timeout_s: float,
    arrival_s: float,
    start: float,
    response: list[int],
) -> Outcome:
    """Send a query; append the tokens of its response to `response`."""
    sent = time.monotonic()
    times: list[float] = []
    timings = None
    error = None
    usage = Usage(0, 0)
    try:
        async for event in client.generate(query, timeout_s=timeout_s):
            if isinstance(event, Finish):
                timings = event.timings
                usage = event.usage
            elif event.token_ids:
                times.append(time.monotonic() - sent)
                response += event.token_ids
    except BatonError as failure:
        error = failure.reason
    return Outcome(
        times[0] if times else None,
        tuple(times),
        len(response),
        timings,
        error,
        arrival_s,
        max(0.0, sent - start - arrival_s),
        usage,
    )
