"""Chat options of `baton generate` and `baton chat`: files of messages and tools, and template
arguments."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from baton.values import ChatMessage, ToolCall
from runtime.errors import ConfigError

Messages = Annotated[
    Path | None,
    typer.Option(
        help="File with a JSON list of messages, in the form of OpenAI's API, to respond to; -: "
        "stdin."
    ),
]
Tools = Annotated[
    Path | None,
    typer.Option(
        help="File with a JSON list of tools, in the form of OpenAI's API, that the model may call."
    ),
]
TemplateArguments = Annotated[
    list[str] | None,
    typer.Option(
        "--template-argument",
        help="NAME=JSON for the model's chat template, such as enable_thinking=false; repeatable.",
    ),
]


@dataclass(frozen=True)
class ChatOptions:
    """Inputs of a chat template besides the messages."""

    tools: tuple[Mapping[str, object], ...] = ()
    template_arguments: Mapping[str, object] = field(default_factory=dict)


def read_options(tools: Path | None, arguments: Sequence[str] | None) -> ChatOptions:
    """Return the options of the flags, or raise ConfigError naming the flag that cannot be read."""
    listed = () if tools is None else tuple(_objects("tools", _read(tools, "tools")))
    return ChatOptions(listed, dict(map(_argument, arguments or ())))


def read_messages(path: Path) -> tuple[ChatMessage, ...]:
    """Return the messages of a file, or raise ConfigError naming the invalid message."""
    messages = _objects("messages", _read(path, "messages"))
    return tuple(_message(index, given) for index, given in enumerate(messages))


def _argument(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    try:
        if name and equals:
            return name, json.loads(value)
    except (ValueError, RecursionError):
        pass
    raise ConfigError(
        f"--template-argument: must be NAME=JSON, such as enable_thinking=false, got {text!r}",
        field="template_argument",
    )


def _read(path: Path, flag: str) -> str:
    if str(path) == "-" and sys.stdin is None:
        raise ConfigError(f"--{flag}: there is no stdin to read", field=flag)
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--{flag}: cannot read {path}: {error}", field=flag) from None


def _objects(flag: str, text: str) -> list[dict[str, Any]]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--{flag}: not JSON: {error}", field=flag) from None
    if (
        not isinstance(found, list)
        or not found
        or not all(isinstance(entry, dict) for entry in found)
    ):
        raise ConfigError(f"--{flag}: must be a JSON list of objects", field=flag)
    return found


def _message(index: int, given: Mapping[str, Any]) -> ChatMessage:
    try:
        content = given.get("content")
        if isinstance(content, list):
            content = tuple(str(part["text"]) for part in content)
        calls = tuple(_call(call) for call in given.get("tool_calls") or ())
        reasoning = given.get("reasoning_content") or given.get("reasoning") or ""
        return ChatMessage(
            given["role"],
            content,
            reasoning,
            calls,
            given.get("tool_call_id") or "",
            given.get("name") or "",
        )
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"--messages: message {index} is not in the form of OpenAI's API: {error!r}",
            field="messages",
        ) from None


def _call(given: Mapping[str, Any]) -> ToolCall:
    function = given["function"]
    arguments = function.get("arguments") or "{}"
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(function["name"], text, given.get("id") or "")
