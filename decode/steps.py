"""What the steps of a pool draw, on its way to the routers: one stream per router, and on it one message for all that
happened to the router's requests since the last one, as a rule within one step.

A router that reads slowly gets fewer and longer messages and holds up nobody; one that reads nothing is given up after
the time that holds for every caller. Unread tokens of a request join, so what a stream holds is bounded by what its
requests may draw. Requests end with the stream that they name: their tokens would reach nobody. Event loop's thread.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

from protos import decode_pb2 as pb
from protos import types_pb2
from runtime.errors import BatonError, FieldViolation, InvalidRequestError, RequestAborted, UnavailableError

MAX_EVENTS = 256  # per message: a router handles one without a pause
MAX_JOINED = 64  # tokens of one event
ARRIVAL_S = 3.0  # a stream may arrive so much later than a request that names it
MIN_ID_CHARS, MAX_ID_CHARS = 16, 64

EndListener = Callable[[BatonError], object]


class StepFeed:
    """One router's. `StepFeeds.opened` makes it."""

    def __init__(self) -> None:
        self._events: deque[pb.StepEvent] = deque()
        self._joinable: dict[int, types_pb2.TokenChunk] = {}  # by key: of its last event, which is not sent yet
        self._has_events = asyncio.Event()
        self._requests: dict[int, EndListener] = {}

    @contextmanager
    def joined(self, key: int, on_end: EndListener) -> Iterator[None]:
        """For as long as a request sends here under `key`; `on_end` is called if the stream ends first.

        Raises:
            InvalidRequestError: another one does.
        """
        if key in self._requests:
            raise InvalidRequestError(FieldViolation("open.steps_key", f"{key} is another request's"))
        self._requests[key] = on_end
        try:
            yield
        finally:
            del self._requests[key]

    def send(self, event: pb.StepEvent) -> None:
        """Tokens join those of the same request that are not sent yet."""
        if not event.HasField("tokens"):
            self._joinable.pop(event.steps_key, None)
        else:
            before = self._joinable.get(event.steps_key)
            if before is not None and len(before.token_ids) + len(event.tokens.token_ids) <= MAX_JOINED:
                before.MergeFrom(event.tokens)
                return
            self._joinable[event.steps_key] = event.tokens
        self._events.append(event)
        self._has_events.set()

    async def messages(self) -> AsyncIterator[pb.StepsResponse]:
        """What is to be sent, without an end."""
        while True:
            await self._has_events.wait()
            events = [self._events.popleft() for _ in range(min(len(self._events), MAX_EVENTS))]
            for event in events:
                self._joinable.pop(event.steps_key, None)
            yield pb.StepsResponse(events=events)
            if not self._events:
                self._has_events.clear()

    def end(self) -> None:
        """The router is gone, or reads nothing."""
        for on_end in list(self._requests.values()):
            on_end(RequestAborted("the router's stream of steps has ended"))


class StepOutlet:
    """What one request sends, each event with its position."""

    def __init__(self, feed: StepFeed, key: int, position: int) -> None:
        """`position`: output tokens that the router has."""
        self._feed = feed
        self._key = key
        self._position = position

    def committed(self, committed: pb.DecodeCommitted) -> None:
        """The request joins, before anything else."""
        self._feed.send(pb.StepEvent(steps_key=self._key, position=self._position, committed=committed))

    def local(self, local: pb.DecodeLocal) -> None:
        """The same of a request without a source."""
        self._feed.send(pb.StepEvent(steps_key=self._key, position=self._position, local=local))

    def drawn(self, tokens: types_pb2.TokenChunk) -> None:
        self._feed.send(pb.StepEvent(steps_key=self._key, position=self._position, tokens=tokens))
        self._position += len(tokens.token_ids)

    def finished(self, finished: pb.DecodeFinished) -> None:
        """Nothing comes after it."""
        self._feed.send(pb.StepEvent(steps_key=self._key, position=self._position, finished=finished))


class StepFeeds:
    """Those of all routers, by the ids that they chose."""

    def __init__(self) -> None:
        self._feeds: dict[str, StepFeed] = {}
        self._opened = asyncio.Event()

    @contextmanager
    def opened(self, steps_id: str) -> Iterator[StepFeed]:
        """For the length of a call.

        Raises:
            InvalidRequestError: no id, or another stream's.
        """
        _check("steps_id", steps_id)
        if steps_id in self._feeds:
            raise InvalidRequestError(FieldViolation("steps_id", "is another stream's"))
        stream = self._feeds[steps_id] = StepFeed()
        self._opened.set()
        self._opened = asyncio.Event()
        try:
            yield stream
        finally:
            del self._feeds[steps_id]
            stream.end()

    async def named(self, steps_id: str) -> StepFeed:
        """The stream of this id. Two calls of one router may arrive in any order.

        Raises:
            InvalidRequestError: no id.
            UnavailableError: there is none, and none comes in time.
        """
        _check("open.steps_id", steps_id)
        try:
            async with asyncio.timeout(ARRIVAL_S):
                while (stream := self._feeds.get(steps_id)) is None:
                    await self._opened.wait()
        except TimeoutError:
            raise UnavailableError("the stream of steps that the request names is not there") from None
        return stream


def _check(field: str, steps_id: str) -> None:
    if not MIN_ID_CHARS <= len(steps_id) <= MAX_ID_CHARS:
        raise InvalidRequestError(FieldViolation(
            field, f"must have {MIN_ID_CHARS} to {MAX_ID_CHARS} characters, has {len(steps_id)}"))
