"""Conversion of carried texts (`router.text.carrier`) to prompts of `baton.v1.Generation`."""

import json
from collections.abc import Mapping
from typing import Any

from protos import generation_pb2 as pb
from router.text.carrier import CHAT_KEY
from runtime.errors import FieldViolation, InvalidRequestError

_DECODER = json.JSONDecoder()


def put_carried(request: pb.GenerateRequest, text: str) -> None:
    """Set the prompt to the conversation that the carrying template wrote, or to the plain text.

    Raises:
        InvalidRequestError: the conversation has contents other than text.
    """
    found = _written_chat(text)
    if found is None:
        request.text = text
        return
    chat, behind = found
    request.chat.SetInParent()
    for index, message in enumerate(chat["messages"]):
        _put_message(request.chat.messages.add(), f"messages[{index}].content", message)
    request.chat.tools.extend(_json(tool) for tool in chat["tools"])
    if arguments := {name: value for name, value in chat["arguments"].items() if name}:
        request.chat.template_arguments = _json(arguments)
    if chat["goes_on"]:
        request.chat.continue_final_message = True
        _cut_final_text(request.chat.messages[-1], behind)


def _written_chat(text: str) -> tuple[Mapping[str, Any], str] | None:
    """Return the conversation of the carrying template, and the text after it; else None."""
    if not text.startswith(f'{{"{CHAT_KEY}": '):
        return None
    try:
        written, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return None
    chat = written[CHAT_KEY]
    fields = {"tools": list, "arguments": dict, "goes_on": bool, "messages": list}
    if not isinstance(chat, dict) or not all(
        isinstance(chat.get(name), kind) for name, kind in fields.items()
    ):
        return None
    return (
        (chat, text[end:])
        if all(isinstance(message, dict) for message in chat["messages"])
        else None
    )


def _put_message(message: pb.ChatMessage, field: str, given: Mapping[str, Any]) -> None:
    content = given.get("content")
    if isinstance(content, list):
        texts = [_text(field, part) for part in content]
        if len(texts) > 1:
            message.content_parts.extend(pb.ContentPart(text=text) for text in texts)
        else:  # gateways wrap each text in a part
            message.content = "".join(texts)
    elif content is not None:
        message.content = str(content)
    for name in ("role", "reasoning_content", "tool_call_id", "name"):
        setattr(message, name, str(given.get(name) or ""))
    for call in given.get("tool_calls") or ():
        function = call.get("function", {})
        message.tool_calls.add(
            id=str(call.get("id") or ""),
            name=str(function.get("name") or ""),
            arguments=_arguments(function.get("arguments")),
        )


def _text(field: str, part: Any) -> str:  # noqa: ANN401 - a value of JSON
    if isinstance(part, dict) and part.get("type") == "text":
        return str(part.get("text") or "")
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise InvalidRequestError(
        FieldViolation(field, f"has a part of the type {kind!r}; only texts are served")
    )


def _arguments(given: Any) -> str:  # noqa: ANN401 - a value of JSON
    return given if isinstance(given, str) else _json(given or {})


def _cut_final_text(message: pb.ChatMessage, text: str) -> None:
    """Set the final message's text to `text`, which lacks the tag that the gateway appended."""
    if message.content_parts:
        message.content_parts[-1].text = text
    else:
        message.content = text


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
