"""Conversations in the form of OpenAI's API, as applications send them, and what transformers makes
of them."""

import itertools
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerFast

from router.text.chat import Chat
from tests.router.harness import byte_level_tokenizer

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
Message = Mapping[str, Any]


@dataclass(frozen=True)
class Conversation:
    """What a client sends. `arguments`: of the chat template."""

    messages: tuple[Message, ...]
    tools: tuple[Message, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    goes_on: bool = False

    def as_chat(self) -> Chat:
        """Return the chat as a router has it: arguments of calls are objects."""
        return Chat(
            tuple(map(_with_objects, self.messages)), self.tools, self.arguments, self.goes_on
        )

    def as_request(self) -> dict[str, Any]:
        """Return the body of a POST to `/v1/chat/completions`."""
        body: dict[str, Any] = {"messages": list(self.messages)}
        if self.tools:
            body["tools"] = list(self.tools)
        if self.arguments:
            body["chat_template_kwargs"] = dict(self.arguments)
        if self.goes_on:
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        return body


def by_transformers(source: str, chat: Chat) -> str | None:
    """Render the conversation by `apply_chat_template`; None if the template refuses it."""
    oracle: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=byte_level_tokenizer(), chat_template=source, **SPECIAL_TOKENS
    )
    try:
        rendered: str = oracle.apply_chat_template(
            list(chat.messages),
            tools=list(chat.tools) or None,
            tokenize=False,
            add_generation_prompt=not chat.continue_final_message,
            continue_final_message=chat.continue_final_message,
            **chat.arguments,
        )
    except Exception:  # noqa: BLE001 - whatever a template raises is a refusal
        return None
    return rendered


def _with_objects(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.loads(call["function"]["arguments"]),
            },
        }
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _call(number: int, arguments: str) -> dict[str, Any]:
    return {
        "id": f"call0000{number}",
        "type": "function",
        "function": {"name": "get_weather", "arguments": arguments},
    }


_USER = {"role": "user", "content": "What is 2 + 2?"}
_ANSWER = {"role": "assistant", "content": "It is 4."}
_SYSTEM = {"role": "system", "content": "Be brief & <kind>."}
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Says the weather — ünïcode.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Where"},
                "days": {"type": "integer", "default": 1},
            },
            "required": ["city"],
        },
    },
}
_ONE, _TWO = _call(1, '{"city": "Köln", "days": 2}'), _call(2, '{"city": "Ulm"}')
_RESULT = {
    "role": "tool",
    "tool_call_id": "call00001",
    "name": "get_weather",
    "content": '{"sky": "clear"}',
}
_NULL = {"role": "assistant", "content": None, "tool_calls": [_ONE]}

CONVERSATIONS = {
    "a question": Conversation((_USER,)),
    "a system message": Conversation((_SYSTEM, _USER)),
    "several turns": Conversation(
        (_USER, _ANSWER, {"role": "user", "content": " größe 東京 👋🏽 \n"})
    ),
    "system and turns": Conversation((_SYSTEM, _USER, _ANSWER, _USER)),
    "tools": Conversation((_USER,), (_TOOL,)),
    "a call without text": Conversation((_USER, _NULL, _RESULT), (_TOOL,)),
    "a call with text": Conversation(
        (_SYSTEM, _USER, {**_NULL, "content": "Let me see."}, _RESULT), (_TOOL,)
    ),
    "two calls": Conversation(
        (
            _USER,
            {**_NULL, "tool_calls": [_ONE, _TWO]},
            _RESULT,
            {**_RESULT, "tool_call_id": "call00002"},
        ),
        (_TOOL,),
    ),
    "turns after a call": Conversation((_USER, _NULL, _RESULT, _ANSWER, _USER), (_TOOL,)),
    "reasoning": Conversation((_USER, {**_ANSWER, "reasoning_content": "Two and two."}, _USER)),
    "no thinking": Conversation((_USER,), arguments={"enable_thinking": False}),
    "thinking": Conversation((_USER,), arguments={"enable_thinking": True, "thinking": True}),
    "parts": Conversation(
        (
            {"role": "system", "content": _parts("Be brief.")},
            {"role": "user", "content": _parts("What", " is this?")},
        )
    ),
    "a final message to go on with": Conversation(
        (_USER, {**_ANSWER, "content": 'He said: "It is'}), goes_on=True
    ),
}


def expected_rendering(source: str, chat: Chat) -> str | None:
    """Render a conversation by transformers in the form in which the template writes all its texts.

    That is as it is, or with the contents of a few roles as texts instead of parts, or the reverse.
    None if the template refuses all.
    """
    roles = sorted({str(message["role"]) for message in chat.messages})
    changed = [
        some for count in range(len(roles) + 1) for some in itertools.combinations(roles, count)
    ]
    rendered = [by_transformers(source, _with_other_contents(chat, some)) for some in changed]
    return next(
        (text for text in rendered if text is not None and _has_all(text, chat)), rendered[0]
    )


def _has_all(rendered: str, chat: Chat) -> bool:
    texts = [text for message in chat.messages for text in _texts_of(message.get("content"))]
    return (
        all(text.strip() in rendered for text in texts)
        and "'type': 'text'" not in rendered
        and '"type": "text"' not in rendered
    )


def _texts_of(content: Any) -> list[str]:  # noqa: ANN401 - of a message
    return (
        []
        if content is None
        else [content]
        if isinstance(content, str)
        else [part["text"] for part in content]
    )


def _with_other_contents(chat: Chat, roles: Collection[str]) -> Chat:
    return replace(
        chat,
        messages=tuple(
            {**message, "content": _other_form(message.get("content"))}
            if message["role"] in roles
            else message
            for message in chat.messages
        ),
    )


def _other_form(content: Any) -> Any:  # noqa: ANN401 - of a message
    if isinstance(content, list):
        return "\n".join(_texts_of(content))
    return None if content is None else _parts(content)
