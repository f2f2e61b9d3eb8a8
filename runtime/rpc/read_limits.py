"""Resources that callers may take of a server, with four limits that are checked for each call:

 - `ReadLimiter`: messages being read. gRPC reads a message whole before any code sees it, so an
   incomplete message may take as many bytes as the server allows. The one that is read for longest
   gives way to the next one. A message that has arrived is read within one turn of the event loop,
   so only slow messages wait for others, and none can block a place.
 - `message_bounds.bounded`: the bytes, parts and numbers of one message, before it is parsed.
 - `CallLimiter`: open calls, and the bytes of their messages.
 - `WriteTimeout`: how long a response may wait for its caller.

A caller without access is rejected before all of these (`runtime.rpc.interceptor`).
"""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from runtime.errors import CapacityError, DeadlineError, FieldViolation, InvalidRequestError

T = TypeVar("T")
MessageT = TypeVar("MessageT")

GREED = 8  # largest use of one client, as a multiple of the rest that is left to others


@dataclass(frozen=True)
class ReadLimits:
    """Limits of messages being read.

    `places` messages are read concurrently, each for at most `timeout_s`, or `crowded_timeout_s` if
    others wait.
    """

    places: int
    crowded_timeout_s: float
    timeout_s: float = 30.0


@dataclass(eq=False)
class _Reading:
    client: str
    since: float  # loop time
    scope: asyncio.Timeout


class ReadLimiter:
    """Reader of a limited number of messages. Build it inside a running event loop.

    A named client has at most half of the places, and waiting clients take turns. So a client whose
    messages never arrive delays only itself.
    """

    def __init__(self, limits: ReadLimits) -> None:
        self._limits = limits
        self._share = max(1, limits.places // 2)
        self._taken: Counter[str] = Counter()
        # In order of the clients' next turns.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._reading: list[_Reading] = []  # oldest first

    @property
    def num_reading(self) -> int:
        return len(self._reading)

    async def receive(
        self,
        read: Callable[[], Awaitable[T]],
        when_over: Callable[[Callable[[], None]], None],
        client: str = "",
    ) -> T:
        """Return the message that `read` returns.

        gRPC keeps the received bytes of a failed read until its call is over, so the read keeps its
        place until then. `when_over` gets the function to call at that time.

        Raises:
            CapacityError: no place became free within `timeout_s`.
            DeadlineError: the message did not arrive within `timeout_s`, or within
                `crowded_timeout_s` while others waited.
        """
        await self._place(client)
        loop = asyncio.get_running_loop()
        began = loop.time()
        reading = None
        try:
            async with asyncio.timeout(self._limits.timeout_s) as scope:
                reading = _Reading(client, began, scope)
                self._reading.append(reading)
                self._press()
                message = await read()
        except BaseException as error:
            when_over(lambda: self._release(client))
            if not isinstance(error, TimeoutError):
                raise
            raise DeadlineError(
                f"the message did not arrive within {loop.time() - began:.3g} s"
            ) from None
        finally:
            if reading is not None:
                self._reading.remove(reading)
        self._release(client)
        return message

    async def _place(self, client: str) -> None:
        if self._may_take(client) and client not in self._waiting:
            self._taken[client] += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        self._press()
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():  # the turn came just before the timeout
                self._release(client)
            else:
                self._forget(client, turn)
            if not isinstance(error, TimeoutError):
                raise
            raise CapacityError(
                f"{self._taken.total()} messages are being received, which is the limit",
                resource="messages",
            ) from None

    def _release(self, client: str) -> None:
        _give_back(self._taken, client, 1)
        for other in tuple(self._waiting):
            while other in self._waiting and self._may_take(other):
                turn = self._waiting[other][0]
                self._forget(other, turn)
                if not turn.done():
                    self._taken[other] += 1
                    turn.set_result(None)
                    if other in self._waiting:
                        self._waiting.move_to_end(other)

    def _forget(self, client: str, turn: "asyncio.Future[None]") -> None:
        if turn in (turns := self._waiting.get(client, ())):
            self._waiting[client].remove(turn)
            if not turns:
                del self._waiting[client]

    def _may_take(self, client: str) -> bool:
        return self._taken.total() < self._limits.places and not self._has_share(client)

    def _has_share(self, client: str) -> bool:
        return bool(client) and self._taken[client] >= self._share

    def _press(self) -> None:
        """Limit the longest-running reads to `crowded_timeout_s`.

        A client that has its share limits its own reads. Each waiter of another client limits one
        read of any client, if all places are taken.
        """
        num_others = 0
        for client, turns in self._waiting.items():
            if self._has_share(client):
                self._hurry([each for each in self._reading if each.client == client][: len(turns)])
            else:
                num_others += len(turns)
        if self._taken.total() >= self._limits.places:
            self._hurry(self._reading[:num_others])

    def _hurry(self, readings: Iterable[_Reading]) -> None:
        now = asyncio.get_running_loop().time()
        for reading in readings:
            # In loop time, as asyncio's scopes count.
            before_s = reading.scope.when()
            deadline_s = max(now, reading.since + self._limits.crowded_timeout_s)
            if not reading.scope.expired() and (before_s is None or deadline_s < before_s):
                reading.scope.reschedule(deadline_s)


class CallLimiter:
    """Limiter of open calls of one kind and of the bytes of their requests.

    A named client has at most `GREED` times the free rest of either, so that other clients always
    get a part however many calls it makes.
    """

    def __init__(self, name: str, max_calls: int, max_bytes: int) -> None:
        """Create the limiter. `name` is the plural in rejections, such as "calls"."""
        self._name = name
        self._max_calls = max_calls
        self._max_bytes = max_bytes
        self._calls_of: Counter[str] = Counter()
        self._bytes_of: Counter[str] = Counter()
        self.num_calls = 0
        self.num_bytes = 0

    @contextmanager
    def taken(self, client: str = "") -> Iterator[None]:
        """Count an open call during the block.

        Raises CapacityError if there are too many, in total or of this client.
        """
        left = self._max_calls - self.num_calls
        own = self._calls_of[client]
        if left <= 0:
            raise CapacityError(
                f"{self._max_calls} {self._name} are open, which is the limit",
                resource=self._name,
            )
        if client and own >= GREED * left:
            raise CapacityError(
                f"{own} {self._name} of this client are open, and {left} are left to others",
                resource=self._name,
            )
        self.num_calls += 1
        self._calls_of[client] += 1
        try:
            yield
        finally:
            self.num_calls -= 1
            _give_back(self._calls_of, client, 1)

    @contextmanager
    def holding(self, num_bytes: int, client: str = "") -> Iterator[None]:
        """Count the bytes of an open call's request during the block.

        Raises CapacityError if the open requests have too many bytes, in total or of this client. A
        single request is always accepted.
        """
        left = self._max_bytes - self.num_bytes - num_bytes
        own = self._bytes_of[client]
        if self.num_bytes and left < 0:
            raise CapacityError(
                f"the messages of the open calls have {self.num_bytes} bytes and this one "
                f"{num_bytes}; the limit is {self._max_bytes}",
                resource="message bytes",
            )
        if client and own and own + num_bytes > GREED * left:
            raise CapacityError(
                f"the messages of this client's calls have {own} bytes and this one {num_bytes}, and "
                f"{left} are left to others",
                resource="message bytes",
            )
        self.num_bytes += num_bytes
        self._bytes_of[client] += num_bytes
        try:
            yield
        finally:
            self.num_bytes -= num_bytes
            _give_back(self._bytes_of, client, num_bytes)


def _give_back(counts: Counter[str], client: str, count: int) -> None:
    counts[client] -= count
    if not counts[client]:
        del counts[client]


class WriteTimeout:
    """Context that raises TimeoutError if one write in its block takes too long.

    The limit is `timeout_s`, at most an eighth longer. It uses one timer per call rather than one
    per response, because there is one response per token.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._writing_since: float | None = None  # loop time
        self._loop = asyncio.get_running_loop()
        self._scope = asyncio.timeout(None)

    @property
    def has_expired(self) -> bool:
        return self._scope.expired()

    async def __aenter__(self) -> None:
        await self._scope.__aenter__()
        self._look()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        await self._scope.__aexit__(kind, error, trace)

    def write_began(self) -> None:
        self._writing_since = self._loop.time()

    def write_ended(self) -> None:
        self._writing_since = None

    def _look(self) -> None:
        now = self._loop.time()
        if self._writing_since is not None and now - self._writing_since >= self._timeout_s:
            self._scope.reschedule(now)
        else:
            self._timer = self._loop.call_later(self._timeout_s / 8, self._look)


async def first_message(stream: AsyncIterator[MessageT], timeout_s: float) -> MessageT:
    """Return the first message of a stream.

    Raises:
        InvalidRequestError: the stream ended without a message.
        DeadlineError: none arrived in time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await anext(stream)
    except StopAsyncIteration:
        raise InvalidRequestError(FieldViolation("stream", "must open with a request")) from None
    except TimeoutError:
        raise DeadlineError(f"no request within {timeout_s} s of the stream's opening") from None
