"""The bounds of one message, checked before it is parsed, and the memory that it takes afterwards."""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import BuiltinMethodType
from typing import TypeVar, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from runtime.errors import FieldViolation, InvalidRequestError

T = TypeVar("T")

# A message with a field or two for each byte takes 500 MiB and a second to parse, which cannot be
# interrupted. So parts are counted first; for messages below `uncounted_bytes` counting costs as
# much as parsing. A chat of 4096 messages that each have a text and a call has 28,673 parts. A
# number takes at least one byte of a message, four bytes of memory, and 17 ns.
MAX_PARTS = 1 << 15
MAX_STAGES = 1024  # processes of a pool that take part in a handoff
MAX_TERMS_BYTES = 4 << 20  # the terms of a handoff
MAX_NUMBERS = 1 << 21
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
