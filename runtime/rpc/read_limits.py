"""Resources that callers may take of a server, with four limits that are checked for each call:

 - `ReadLimiter`: messages being read. gRPC reads a message whole before any code sees it, so an
   incomplete message may take as many bytes as the server allows. The one that is read for longest
   gives way to the next one. A message that has arrived is read within one turn of the event loop,
   so only slow messages wait for others, and none can block a place.
 - `bounded`: the bytes, parts and numbers of one message, before it is parsed.
 - `CallLimiter`: open calls, and the bytes of their messages.
 - `WriteTimeout`: how long a response may wait for its caller.

A caller without access is rejected before all of these (`runtime.rpc.interceptor`).
"""

import asyncio
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import BuiltinMethodType, TracebackType
from typing import TypeVar, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from runtime.errors import CapacityError, DeadlineError, FieldViolation, InvalidRequestError

T = TypeVar("T")
MessageT = TypeVar("MessageT")

# A message with a field or two for each byte takes 500 MiB and a second to parse, which cannot be
# interrupted. So parts are counted first; for messages below `uncounted_bytes` counting costs as
# much as parsing. A chat of 4096 messages that each have a text and a call has 28,673 parts. A
# number takes at least one byte of a message, four bytes of memory, and 17 ns.
MAX_PARTS = 1 << 15
MAX_NUMBERS = 1 << 21
GREED = 8  # largest use of one client, as a multiple of the rest that is left to others
# gzip reaches 1000:1, prompts rarely exceed 10:1.
FREE_INFLATED_BYTES = 64 << 10
MAX_INFLATION = 32
_GZIP = b"\x1f\x8b"
_GZIP_WINDOW_BITS = 31
# A number of a prompt is stored three times: in the request, in the message to a worker, and as a
# machine integer.
_HELD_NUMBER_BYTES = 12
_MAX_LOOKED_AT = 32  # messages of one field whose numbers are counted


@dataclass(frozen=True)
class ReadLimits:
    """Limits of messages being read.

    `places` messages are read concurrently, each for at most `limit_s`, or `patience_s` if others
    wait.
    """

    places: int
    patience_s: float
    limit_s: float = 30.0


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
            CapacityError: no place became free within `limit_s`.
            DeadlineError: the message did not arrive within `limit_s`, or within `patience_s` while
                others waited.
        """
        await self._place(client)
        loop = asyncio.get_running_loop()
        began = loop.time()
        reading = None
        try:
            async with asyncio.timeout(self._limits.limit_s) as scope:
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
            async with asyncio.timeout(self._limits.limit_s):
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
        """Limit the longest-running reads to `patience_s`.

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
            ends_at = reading.scope.when()
            until = max(now, reading.since + self._limits.patience_s)
            if not reading.scope.expired() and (ends_at is None or until < ends_at):
                reading.scope.reschedule(until)


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

    The limit is `limit_s`, at most an eighth longer. It uses one timer per call rather than one per
    response, because there is one response per token.
    """

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
        if self._writing_since is not None and now - self._writing_since >= self._limit_s:
            self._scope.reschedule(now)
        else:
            self._timer = self._loop.call_later(self._limit_s / 8, self._look)


@dataclass(frozen=True)
class MessageBounds:
    """Limits of one message. Parts and numbers are counted only above `uncounted_bytes`."""

    max_bytes: int
    uncounted_bytes: int = 256 << 10


def bounded(parse: Callable[[bytes], T] | None, bounds: MessageBounds) -> Callable[[bytes], T]:
    """Wrap `parse`, the `FromString` of a message type, with limits.

    The result raises InvalidRequestError for a message that cannot be parsed. It also raises it,
    before parsing, for a message that is too long or has too many parts or numbers.

    Messages compressed with gzip are inflated here and not by gRPC, whose only limit is the size of
    the largest message. They carry no flag, but a protobuf message never begins with the first byte
    of gzip, which would be a field of type 7.
    """
    kind = parse.__self__ if isinstance(parse, BuiltinMethodType) else None
    descriptor = None
    if isinstance(kind, type) and issubclass(kind, Message):
        descriptor = cast("Descriptor", kind.DESCRIPTOR)  # the stubs know two kinds of descriptors

    def parse_bounded(raw: bytes) -> T:
        assert parse is not None
        if raw.startswith(_GZIP):
            raw = _inflated(raw, bounds.max_bytes)
        if (num_bytes := len(raw)) > bounds.max_bytes:
            del raw  # otherwise the traceback keeps it alive
            raise _refused(
                f"a message may have at most {bounds.max_bytes} bytes, this one has {num_bytes}"
            )
        try:
            if num_bytes > bounds.uncounted_bytes and descriptor is not None:
                _check_parts(raw, descriptor)
            return parse(raw)
        except (DecodeError, IndexError) as error:
            raise _refused(f"is not a message of its type: {error}") from error

    return parse_bounded


def _refused(problem: str) -> InvalidRequestError:
    return InvalidRequestError(FieldViolation("request", problem))


def _inflated(raw: bytes, max_bytes: int) -> bytes:
    """Decompress a whole gzip member.

    Raises InvalidRequestError at `max_bytes` or at the largest allowed ratio.
    """
    limit = min(max_bytes, FREE_INFLATED_BYTES + MAX_INFLATION * len(raw))
    inflater = zlib.decompressobj(_GZIP_WINDOW_BITS)
    try:
        inflated = inflater.decompress(raw, limit + 1)
    except zlib.error as error:
        raise _refused(f"is not a message of its type: {error}") from None
    if len(inflated) > limit:
        raise _refused(
            f"a compressed message of {len(raw)} bytes may have at most {limit} when it is inflated"
        )
    if not inflater.eof:
        raise _refused("is not a message of its type: the compressed bytes end too early")
    return inflated


@dataclass(frozen=True)
class _Fields:
    """Fields of a message type: those that are messages, with their types, and those of numbers."""

    messages: Mapping[int, Descriptor]
    numbers: frozenset[int]


@cache
def _fields_of(descriptor: Descriptor) -> _Fields:
    texts = FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES
    return _Fields(
        {
            field.number: field.message_type
            for field in descriptor.fields
            if field.message_type is not None
        },
        frozenset(
            field.number
            for field in descriptor.fields
            if field.message_type is None and field.type not in texts
        ),
    )


def _check_parts(raw: bytes, descriptor: Descriptor) -> None:
    """Count the fields and numbers in a serialized message without parsing it.

    Raises:
        InvalidRequestError: there are too many.
        DecodeError, IndexError: it is not a message.
    """
    num_parts = num_numbers = at = 0
    end = len(raw)
    fields = _fields_of(descriptor)
    outer = list[tuple[int, _Fields]]()
    while at < end or outer:
        if at >= end:
            end, fields = outer.pop()
            continue
        num_parts += 1
        if num_parts > MAX_PARTS:
            raise _refused(
                f"a message of {len(raw)} bytes may have at most {MAX_PARTS} fields and entries"
            )
        tag, at = (raw[at], at + 1) if raw[at] < 128 else _varint(raw, at)
        if tag & 7 != 2:
            at = _behind_number(raw, at, tag & 7)
            continue
        length, at = (raw[at], at + 1) if raw[at] < 128 else _varint(raw, at)
        inner = fields.messages.get(tag >> 3)
        if inner is not None:
            outer.append((end, fields))
            end = at + length
            fields = _fields_of(inner)
            continue
        if tag >> 3 in fields.numbers:
            num_numbers += len(raw[at : at + length].translate(None, _CONTINUED))
            if num_numbers > MAX_NUMBERS:
                raise _refused(f"a message may have at most {MAX_NUMBERS} numbers")
        at += length


_CONTINUED = bytes(range(128, 256))  # the bytes of a varint except the last
_FIXED_BYTES = {1: 8, 5: 4}  # bytes of a number by the type of its field


def _behind_number(raw: bytes, at: int, field_type: int) -> int:
    if field_type == 0:
        return _varint(raw, at)[1]
    if field_type not in _FIXED_BYTES:
        raise DecodeError(f"a field of type {field_type}")
    return at + _FIXED_BYTES[field_type]


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """Return the number at `at`, and the offset after it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = raw[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
    raise DecodeError("a number of more than ten bytes")


def held_bytes(message: Message) -> int:
    """Return the memory that a request takes while its call is open.

    This is its encoded size and the copies of its numbers.
    """
    return message.ByteSize() + _HELD_NUMBER_BYTES * _num_numbers(message)


def _num_numbers(message: Message) -> int:
    """Count the numbers in the repeated fields of a message and of its submessages."""
    total = 0
    for field, value in message.ListFields():
        is_repeated = field.is_repeated
        if field.message_type is None:
            total += len(value) if is_repeated and field.type != FieldDescriptor.TYPE_STRING else 0
        elif not is_repeated:
            total += _num_numbers(value)
        elif not field.message_type.GetOptions().map_entry and len(value) <= _MAX_LOOKED_AT:
            total += sum(map(_num_numbers, value))
    return total


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
