"""The list of changes of the public API is complete."""

import hashlib
import re
from collections.abc import Iterator

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor

from protos import generation_pb2 as pb
from tests.architecture.source import ROOT


def lines_of(kind: Descriptor | EnumDescriptor, seen: set[str]) -> Iterator[str]:
    """Yield a line for each field or value that is reachable from a message or an enumeration."""
    if kind.full_name in seen:
        return
    seen.add(kind.full_name)
    if isinstance(kind, EnumDescriptor):
        for value in kind.values:
            yield f"{kind.full_name}.{value.name} = {value.number}"
        return
    for field in kind.fields:
        place = f"{field.containing_oneof.name}: " if field.containing_oneof else ""
        named = field.message_type or field.enum_type
        many = "repeated " if field.is_repeated else ""
        text = named.full_name if named else str(field.type)
        yield f"{kind.full_name}.{place}{many}{text} {field.name} = {field.number}"
        if named:
            yield from lines_of(named, seen)


def api() -> list[str]:
    seen: set[str] = set()
    found = []
    for method in pb.DESCRIPTOR.services_by_name["Generation"].methods:
        streams = (method.client_streaming, method.server_streaming)
        found.append(f"{method.name} {method.input_type.name} {method.output_type.name} {streams}")
        found.extend(lines_of(method.input_type, seen))
        found.extend(lines_of(method.output_type, seen))
    return sorted(found)


def test_every_change_of_the_api_is_listed() -> None:
    text = (ROOT / "protos/CHANGES.md").read_text()
    stated = re.search(r"^Digest: `(\w+)`$", text, re.MULTILINE)
    assert stated is not None
    digest = hashlib.sha256("\n".join(api()).encode()).hexdigest()[:12]
    assert stated[1] == digest, f"add an entry with `{digest}` to protos/CHANGES.md"


def test_the_api_reaches_fields_of_fields() -> None:
    """Also values of enumerations, and labels."""
    found = api()
    assert any(line.endswith("FinishReason.FINISH_REASON_STOP = 1") for line in found)
    assert any(".SamplingParams." in line for line in found)
    kind = str(FieldDescriptor.TYPE_UINT32)
    assert any(f"repeated {kind} ids = 1" in line for line in found)
