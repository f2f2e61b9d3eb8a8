"""Fields of requests that a newer version of the protos has.

Protobuf keeps such fields silently. A response without one is complete for its reader, but a request
without one is another request: its answer would not be what the client asked for.
"""

from collections.abc import Iterator
from functools import cache
from itertools import islice
from typing import Any, cast

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from runtime.errors import FieldViolation
from runtime.rpc.status import MAX_VIOLATIONS
from runtime.version import VERSION


def unknown_fields(message: Message) -> list[FieldViolation]:
    """Return a violation for each unknown field of a request, nested ones included.

    No more are listed than a status reports.
    """
    problem = f"is unknown to this version ({VERSION}): leave it out, or upgrade"
    return [FieldViolation(path, problem) for path in islice(_paths(message, ""), MAX_VIOLATIONS)]


def _paths(message: Message, prefix: str) -> Iterator[str]:
    unknown = UnknownFieldSet(message)
    for at in range(len(unknown)):
        yield f"{prefix}field {unknown[at].field_number}"
    for name, is_repeated in _message_fields(cast("Descriptor", message.DESCRIPTOR)):
        if is_repeated:
            inner: Any = getattr(message, name)
            for at, each in enumerate(inner):
                yield from _paths(each, f"{prefix}{name}[{at}].")
        elif message.HasField(name):
            yield from _paths(getattr(message, name), f"{prefix}{name}.")


@cache
def _message_fields(descriptor: Descriptor) -> tuple[tuple[str, bool], ...]:
    """Return the names of a type's fields that are messages, and whether each is repeated."""
    return tuple(
        (field.name, field.is_repeated)
        for field in descriptor.fields
        if field.message_type is not None and not field.message_type.GetOptions().map_entry
    )
