"""Fields that an older process does not know: it refuses the request and names them."""

from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from protos import generation_pb2, types_pb2
from runtime.rpc.status import MAX_VIOLATIONS
from runtime.rpc.unknown_fields import unknown_fields

UNKNOWN = b"\x98\x3e\x01"  # field 995, a number
TYPES = generation_pb2.GenerateRequest, types_pb2.EngineRequest
VALUES = {
    FieldDescriptor.CPPTYPE_STRING: "1",
    FieldDescriptor.CPPTYPE_DOUBLE: 1.0,
    FieldDescriptor.CPPTYPE_FLOAT: 1.0,
    FieldDescriptor.CPPTYPE_BOOL: True,
}
FIELDS = [
    pytest.param(kind, field.name, id=f"{kind.__name__}.{field.name}")
    for kind in TYPES
    for field in kind.DESCRIPTOR.fields
]


def fill(message: Message) -> Message:
    """Set every field, nested ones included."""
    for field in message.DESCRIPTOR.fields:
        inner: Any = getattr(message, field.name)
        if field.message_type is None:
            value = b"x" if field.type == field.TYPE_BYTES else VALUES.get(field.cpp_type, 1)
            inner.append(value) if field.is_repeated else setattr(message, field.name, value)
        elif field.message_type.GetOptions().map_entry:
            inner[1] = 1.0
        else:
            fill(inner.add() if field.is_repeated else inner)
    return message


def type_of(kind: type[Message], *, without: str = "") -> type[Message]:
    """Return the message type as it was before it got the field `without`.

    It has no oneofs, so that all fields can be set.
    """
    pool = descriptor_pool.DescriptorPool()
    added = set[str]()

    def add(descriptor: Any) -> None:  # noqa: ANN401 - the stubs know two kinds of descriptors
        for imported in descriptor.dependencies:
            add(imported)
        if descriptor.name in added:
            return
        added.add(descriptor.name)
        file = descriptor_pb2.FileDescriptorProto()
        descriptor.CopyToProto(file)
        for message in file.message_type:
            if message.name == kind.DESCRIPTOR.name:
                kept = [field for field in message.field if field.name != without]
                for field in kept:
                    field.ClearField("oneof_index")
                    field.ClearField("proto3_optional")
                del message.field[:], message.oneof_decl[:]
                message.field.extend(kept)
        pool.Add(file)

    add(kind.DESCRIPTOR.file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(kind.DESCRIPTOR.full_name))


@pytest.mark.parametrize(("kind", "name"), FIELDS)
def test_an_older_process_names_each_field_that_it_lacks(kind: type[Message], name: str) -> None:
    sent = fill(type_of(kind)()).SerializeToString()
    assert unknown_fields(kind.FromString(sent)) == []
    seen = type_of(kind, without=name).FromString(sent)
    number = next(field.number for field in kind.DESCRIPTOR.fields if field.name == name)
    assert [violation.field for violation in unknown_fields(seen)] == [f"field {number}"]


def test_nested_fields_are_named_by_their_path() -> None:
    request = generation_pb2.GenerateRequest()
    request.sampling.MergeFromString(UNKNOWN)
    request.chat.messages.add()
    request.chat.messages.add().MergeFromString(UNKNOWN)
    assert {violation.field for violation in unknown_fields(request)} == {
        "sampling.field 995",
        "chat.messages[1].field 995",
    }


def test_no_more_are_named_than_a_status_reports() -> None:
    request = types_pb2.EngineRequest.FromString(UNKNOWN * 10_000)
    assert len(unknown_fields(request)) == MAX_VIOLATIONS
