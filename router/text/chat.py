"""A conversation in the form that chat templates expect."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

# Cost of a message in addition to its texts: rendering takes as long as encoding this many
# characters.
MESSAGE_CHARACTERS = 16

MessageFields = Mapping[str, Any]


@dataclass(frozen=True)
class Chat:
    """A conversation for a chat template.

    Turns have roles and contents in the form of OpenAI's API. `tools` are the functions that the
    model may call, `arguments` those of its template. With `continue_final_message` the response
    continues the last turn instead of starting a new one.
    """

    messages: tuple[MessageFields, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    continue_final_message: bool = False

    @cached_property
    def num_characters(self) -> int:
        """Return the rendering cost, in characters of text."""
        texts = sum(_num_characters(part) for part in (*self.messages, *self.tools, self.arguments))
        return texts + MESSAGE_CHARACTERS * len(self.messages)


def chat_of_texts(*turns: tuple[str, str]) -> Chat:
    """Return a conversation of plain texts, given as (role, content)."""
    return Chat(tuple({"role": role, "content": content} for role, content in turns))


def _num_characters(value: object) -> int:
    """Return the number of characters of the texts in a JSON value, including field names."""
    total = 0
    pending = [value]
    while pending:
        match pending.pop():
            case str(text):
                total += len(text)
            case Mapping() as fields:
                pending += fields.keys()
                pending += fields.values()
            case list() | tuple() as items:
                pending += items
            case _:
                total += 1
    return total


def text_parts(content: object) -> list[str] | None:
    """Return the texts of a content that consists of text parts only, else None."""
    if not isinstance(content, list | tuple):
        return None
    parts = [
        part.get("text")
        for part in content
        if isinstance(part, Mapping) and part.get("type") == "text"
    ]
    return None if len(parts) < len(content) else [str(part) for part in parts]


def as_parts(texts: Iterable[str]) -> list[dict[str, str]]:
    """Return a content of text parts."""
    return [{"type": "text", "text": text} for text in texts]


def read_object(text: str) -> dict[str, Any]:
    """Return the object that a JSON text holds.

    Raises:
        ValueError: the text is not JSON, or not an object.
    """
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"it is a {type(value).__name__}")
    return value
