"""What callers may take of a server. Three bounds, checked call by call:

 - `Intake`: messages being read. gRPC reads a message whole before any code sees it, so a message on its way may take
   as many bytes as its server admits. The one read for longest makes room for the next one: a message that has arrived
   is read within a turn of the event loop, so only slow ones wait for others, and none can hold a place.
 - `Seats`: calls under way, and the bytes of their messages.
 - `StallWatch`: how long a response may wait for its caller.

A caller that may not call is refused before either (`runtime.interceptor`).
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from google.protobuf.message import DecodeError

from runtime.errors import CapacityError, DeadlineError, FieldViolation, InvalidRequestError

T = TypeVar("T")
MessageT = TypeVar("MessageT")


@dataclass(frozen=True)
class IntakeLimits:
    """`places` messages are read at once, each for `limit_s`; where others wait, for `patience_s`."""

    places: int
    patience_s: float
    limit_s: float = 30.0


@dataclass(eq=False)
class _Reading:
    since: float  # loop time
    scope: asyncio.Timeout


class Intake:
    """Reads messages, a few at a time. Build inside a running event loop."""

    def __init__(self, limits: IntakeLimits) -> None:
        self._limits = limits
        self._places = asyncio.Semaphore(limits.places)
        self._waiting = 0
        self._reading: list[_Reading] = []  # the longest first

    @property
    def num_reading(self) -> int:
        return len(self._reading)

    async def receive(self, read: Callable[[], Awaitable[T]], when_over: Callable[[Callable[[], None]], None]) -> T:
        """What `read` gives. A read that fails keeps its place until its call is over, for so long gRPC keeps what has
        arrived: `when_over` is given what to call then.

        Raises:
            CapacityError: no place within `limit_s`.
            DeadlineError: the message did not arrive within `limit_s`, or within `patience_s` while others waited.
        """
        await self._place()
        loop = asyncio.get_running_loop()
        began, reading = loop.time(), None
        try:
            async with asyncio.timeout(self._limits.limit_s) as scope:
                reading = _Reading(began, scope)
                self._reading.append(reading)
                self._press()
                message = await read()
        except BaseException as error:
            when_over(self._places.release)
            if not isinstance(error, TimeoutError):
                raise
            raise DeadlineError(f"the message did not arrive within {loop.time() - began:.3g} s") from None
        finally:
            if reading is not None:
                self._reading.remove(reading)
        self._places.release()
        return message

    async def _place(self) -> None:
        if not self._places.locked():
            await self._places.acquire()  # at once
            return
        self._waiting += 1
        self._press()
        try:
            async with asyncio.timeout(self._limits.limit_s):
                await self._places.acquire()
        except TimeoutError:
            raise CapacityError(f"{self._limits.places} messages are being received, which is the limit",
                                resource="messages") from None
        finally:
            self._waiting -= 1

    def _press(self) -> None:
        """As many of those read for longest as there are waiters get no more than `patience_s`."""
        if not self._places.locked():
            return
        now = asyncio.get_running_loop().time()
        for reading in self._reading[:self._waiting]:
            ends_at, until = reading.scope.when(), max(now, reading.since + self._limits.patience_s)
            if not reading.scope.expired() and (ends_at is None or until < ends_at):
                reading.scope.reschedule(until)


class Seats:
    """Calls under way of one kind, and the bytes of the messages they began with."""

    def __init__(self, name: str, max_calls: int, max_bytes: int) -> None:
        """`name` is how the refusal calls them: "calls"."""
        self._name = name
        self._max_calls = max_calls
        self._max_bytes = max_bytes
        self.num_calls = 0
        self.num_bytes = 0

    @contextmanager
    def taken(self) -> Iterator[None]:
        """A call under way. Raises CapacityError when there are too many."""
        if self.num_calls >= self._max_calls:
            raise CapacityError(f"{self._max_calls} {self._name} are under way, which is the limit",
                                resource=self._name)
        self.num_calls += 1
        try:
            yield
        finally:
            self.num_calls -= 1

    @contextmanager
    def holding(self, num_bytes: int) -> Iterator[None]:
        """A message held by its call. Raises CapacityError when those held have too many bytes; one alone never has."""
        if self.num_bytes and self.num_bytes + num_bytes > self._max_bytes:
            raise CapacityError(f"the messages of the calls under way have {self.num_bytes} bytes and this one "
                                f"{num_bytes}; the limit is {self._max_bytes}", resource="message bytes")
        self.num_bytes += num_bytes
        try:
            yield
        finally:
            self.num_bytes -= num_bytes


class StallWatch:
    """Ends the block with a TimeoutError when one write in it lasts for `limit_s`, at most an eighth longer. One timer
    for a call and not one for a response, of which there are as many as tokens."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._writing_since: float | None = None  # loop time
        self._loop = asyncio.get_running_loop()
        self._scope = asyncio.timeout(None)

    @property
    def has_expired(self) -> bool:
        return self._scope.expired()

    async def __aenter__(self) -> None:
        await self._scope.__aenter__()
        self._look()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        self._timer.cancel()
        await self._scope.__aexit__(kind, error, trace)

    def write_began(self) -> None:
        self._writing_since = self._loop.time()

    def write_ended(self) -> None:
        self._writing_since = None

    def _look(self) -> None:
        now = self._loop.time()
        if self._writing_since is not None and now - self._writing_since >= self._limit_s:
            self._scope.reschedule(now)
        else:
            self._timer = self._loop.call_later(self._limit_s / 8, self._look)


def bounded(parse: Callable[[bytes], T] | None, max_bytes: int) -> Callable[[bytes], T]:
    """`parse` for messages of at most `max_bytes`. What it gives raises InvalidRequestError for a longer one, before it
    is parsed, and for one that cannot be parsed."""

    def parse_bounded(raw: bytes) -> T:
        if (num_bytes := len(raw)) > max_bytes:
            del raw  # else it lives as long as the traceback
            raise InvalidRequestError(FieldViolation(
                "request", f"a message may have at most {max_bytes} bytes, this one has {num_bytes}"))
        assert parse is not None
        try:
            return parse(raw)
        except DecodeError as error:
            raise InvalidRequestError(FieldViolation("request", f"is no message of its type: {error}")) from error

    return parse_bounded


async def first_message(stream: AsyncIterator[MessageT], timeout_s: float) -> MessageT:
    """The message that opens a stream.

    Raises:
        InvalidRequestError: the stream ended without one.
        DeadlineError: none came in time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await anext(stream)
    except StopAsyncIteration:
        raise InvalidRequestError(FieldViolation("stream", "must open with a request")) from None
    except TimeoutError:
        raise DeadlineError(f"no request within {timeout_s} s of the stream's opening") from None
