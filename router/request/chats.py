"""Conversations of requests: validation, and conversion for the chat template."""

from collections.abc import Iterable
from typing import Any

from protos import generation_pb2
from router.text.chat import Chat, as_parts, read_object
from router.text.chat_template import RESERVED_ARGUMENTS
from runtime.errors import FieldViolation, InvalidRequestError

MAX_CHAT_MESSAGES = 4096
MAX_TOOLS = 1024
MAX_TOOL_CALLS = 1024  # per message
MAX_CONTENT_PARTS = 1024  # per message
# Characters of tools, calls and template arguments together: they are parsed inline.
MAX_JSON_CHARACTERS = 1 << 20


def chat_violations(chat: generation_pb2.ChatMessages) -> Iterable[FieldViolation]:
    """Yield the violations of a conversation that do not depend on the model."""
    if not chat.messages:
        yield FieldViolation("chat.messages", "must not be empty")
    if (count := len(chat.messages)) > MAX_CHAT_MESSAGES:
        yield FieldViolation(
            "chat.messages", f"has {count} entries, the limit is {MAX_CHAT_MESSAGES}"
        )
        return
    if (count := len(chat.tools)) > MAX_TOOLS:
        yield FieldViolation("chat.tools", f"has {count} entries, the limit is {MAX_TOOLS}")
        return
    for index, message in enumerate(chat.messages):
        yield from _message_violations(f"chat.messages[{index}]", message)
    if (size := sum(map(len, _json_texts(chat)))) > MAX_JSON_CHARACTERS:
        yield FieldViolation(
            "chat",
            f"has {size} characters of JSON in tools, calls and template arguments, the limit "
            f"is {MAX_JSON_CHARACTERS}",
        )
        return
    try:
        chat_of(chat)
    except InvalidRequestError as error:
        yield from error.violations


def num_characters(chat: generation_pb2.ChatMessages) -> int:
    """Return the number of characters of the messages, over all fields."""
    return sum(
        len(message.role)
        + len(message.content)
        + sum(len(part.text) for part in message.content_parts)
        + len(message.reasoning_content)
        + len(message.name)
        + sum(len(call.name) + len(call.arguments) for call in message.tool_calls)
        for message in chat.messages
    )


def chat_of(chat: generation_pb2.ChatMessages) -> Chat:
    """Return a conversation in the form that chat templates expect.

    Raises:
        InvalidRequestError: a text that must be JSON is not; one violation for each.
    """
    reader = _JsonReader()
    messages = tuple(
        _turn_of(f"chat.messages[{index}]", message, reader)
        for index, message in enumerate(chat.messages)
    )
    tools = tuple(
        reader.read(f"chat.tools[{index}]", tool) for index, tool in enumerate(chat.tools)
    )
    arguments = reader.read("chat.template_arguments", chat.template_arguments or "{}")
    reader.violations += (
        FieldViolation(f"chat.template_arguments.{name}", "cannot be given as an argument")
        for name in RESERVED_ARGUMENTS
        if name in arguments
    )
    if reader.violations:
        raise InvalidRequestError(*reader.violations)
    return Chat(messages, tools, arguments, chat.continue_final_message)


class _JsonReader:
    """Reader of JSON objects that collects violations."""

    def __init__(self) -> None:
        self.violations: list[FieldViolation] = []

    def read(self, field: str, text: str) -> dict[str, Any]:
        try:
            return read_object(text)
        except ValueError as error:
            self.violations.append(FieldViolation(field, f"must be a JSON object: {error}"))
            return {}


def _turn_of(
    field: str, message: generation_pb2.ChatMessage, reader: _JsonReader
) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": message.role}
    if message.content_parts:
        turn["content"] = as_parts(part.text for part in message.content_parts)
    elif message.HasField("content") or not (message.tool_calls or message.reasoning_content):
        turn["content"] = message.content
    if message.reasoning_content:
        turn["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        turn["tool_calls"] = [
            _call_of(f"{field}.tool_calls[{index}].arguments", call, reader)
            for index, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id:
        turn["tool_call_id"] = message.tool_call_id
    if message.name:
        turn["name"] = message.name
    return turn


def _call_of(field: str, call: generation_pb2.ToolCall, reader: _JsonReader) -> dict[str, Any]:
    """Return a call with its arguments as an object: templates serialize them by themselves."""
    function = {"name": call.name, "arguments": reader.read(field, call.arguments or "{}")}
    return {**({"id": call.id} if call.id else {}), "type": "function", "function": function}


def _message_violations(
    field: str, message: generation_pb2.ChatMessage
) -> Iterable[FieldViolation]:
    if not message.role:
        yield FieldViolation(f"{field}.role", "must not be empty")
    if message.HasField("content") and message.content_parts:
        yield FieldViolation(f"{field}.content_parts", "cannot be combined with content")
    if (count := len(message.content_parts)) > MAX_CONTENT_PARTS:
        yield FieldViolation(
            f"{field}.content_parts", f"has {count} entries, the limit is {MAX_CONTENT_PARTS}"
        )
    elif not all(part.HasField("text") for part in message.content_parts):
        yield FieldViolation(f"{field}.content_parts", "must consist of texts")
    if (count := len(message.tool_calls)) > MAX_TOOL_CALLS:
        yield FieldViolation(
            f"{field}.tool_calls", f"has {count} entries, the limit is {MAX_TOOL_CALLS}"
        )
    elif not all(call.name for call in message.tool_calls):
        yield FieldViolation(f"{field}.tool_calls", "must name the function of every call")


def _json_texts(chat: generation_pb2.ChatMessages) -> Iterable[str]:
    yield from chat.tools
    yield chat.template_arguments
    yield from (call.arguments for message in chat.messages for call in message.tool_calls)
