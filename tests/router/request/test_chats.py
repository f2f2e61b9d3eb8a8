"""Conversations of requests: everything that OpenAI's API has in them reaches the chat template,
and what is wrong is named by its field."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from protos import generation_pb2 as pb
from router.request.chats import chat_of, chat_violations
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import TextTokenizer
from runtime.errors import InvalidRequestError
from tests.router.harness import byte_level_tokenizer, running_router, served_model
from tests.support.router.fake_workers import (
    VOCAB_SIZE,
    Fabric,
    FakeDecode,
    FakePrefill,
    Journal,
    expected_tokens,
)

TOOL = '{"type": "function", "function": {"name": "f", "parameters": {"z": 1, "a": 2.0}}}'
TALK = pb.ChatMessages(
    messages=[
        pb.ChatMessage(
            role="system", content_parts=[pb.ContentPart(text="be"), pb.ContentPart(text="brief")]
        ),
        pb.ChatMessage(role="user", content="red?", name="Ada"),
        pb.ChatMessage(
            role="assistant",
            reasoning_content="why not",
            tool_calls=[
                pb.ToolCall(id="c1", name="f", arguments='{"z": 1, "a": [1.5, "ö"]}'),
                pb.ToolCall(name="g"),
            ],
        ),
        pb.ChatMessage(role="tool", content="", tool_call_id="c1"),
        pb.ChatMessage(role="user"),
    ],
    tools=[TOOL],
    template_arguments='{"enable_thinking": false}',
    continue_final_message=True,
)


def test_a_chat_template_gets_the_fields_of_openais_api() -> None:
    chat = chat_of(TALK)
    assert list(chat.messages) == [
        {
            "role": "system",
            "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}],
        },
        {"role": "user", "content": "red?", "name": "Ada"},
        {
            "role": "assistant",
            "reasoning_content": "why not",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "f", "arguments": {"z": 1, "a": [1.5, "ö"]}},
                },
                {"type": "function", "function": {"name": "g", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "", "tool_call_id": "c1"},
        {"role": "user", "content": ""},
    ]
    assert json.dumps(chat.tools[0]) == TOOL, "in the order in which its fields were given"
    assert (chat.arguments, chat.continue_final_message) == ({"enable_thinking": False}, True)
    assert list(chat_violations(TALK)) == []


Change = Callable[[pb.ChatMessages], Any]


def message(**fields: Any) -> Change:  # noqa: ANN401
    return lambda chat: chat.messages.append(pb.ChatMessage(role="user", **fields))


def chat_with(**fields: Any) -> Change:  # noqa: ANN401
    return lambda chat: chat.MergeFrom(pb.ChatMessages(**fields))


def call(arguments: str) -> Change:
    return message(tool_calls=[pb.ToolCall(name="f"), pb.ToolCall(name="f", arguments=arguments)])


BAD: dict[str, tuple[Change, str, str]] = {
    "text and parts": (
        message(content="", content_parts=[pb.ContentPart(text="a")]),
        "messages[1].content_parts",
        "combined with content",
    ),
    "a part of nothing": (
        message(content_parts=[pb.ContentPart()]),
        "messages[1].content_parts",
        "consist of texts",
    ),
    "many parts": (
        message(content_parts=[pb.ContentPart(text="")] * 1025),
        "messages[1].content_parts",
        "1025 entries, the limit is 1024",
    ),
    "a call of nothing": (
        message(tool_calls=[pb.ToolCall(id="a")]),
        "messages[1].tool_calls",
        "name the function of every call",
    ),
    "many calls": (
        message(tool_calls=[pb.ToolCall(name="f")] * 1025),
        "messages[1].tool_calls",
        "1025 entries",
    ),
    "arguments that are none": (
        call("{"),
        "messages[1].tool_calls[1].arguments",
        "must be a JSON object",
    ),
    "arguments that are a list": (
        call("[]"),
        "messages[1].tool_calls[1].arguments",
        "it is a list",
    ),
    "half a character": (
        call('{"a": "\\ud800"}'),
        "messages[1].tool_calls[1].arguments",
        "surrogates",
    ),
    "a number of many digits": (
        call('{"a": %s}' % ("9" * 5000)),
        "messages[1].tool_calls[1].arguments",
        "4300 digits",
    ),
    "deep arguments": (
        chat_with(template_arguments='{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"),
        "template_arguments",
        "nested too deeply",
    ),
    "a tool that is none": (chat_with(tools=[TOOL, "f"]), "tools[1]", "must be a JSON object"),
    "many tools": (chat_with(tools=["{}"] * 1025), "tools", "1025 entries, the limit is 1024"),
    "much JSON": (
        chat_with(tools=['{"a": "%s"}' % ("x" * 1_048_576)]),
        "",
        "1048585 characters of JSON",
    ),
    "a name of its own": (
        chat_with(template_arguments='{"tools": []}'),
        "template_arguments.tools",
        "cannot be given as an argument",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_violations_name_the_field_and_its_limit(name: str) -> None:
    change, field, words = BAD[name]
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="red")])
    change(chat)
    (violation,) = chat_violations(chat)
    assert violation.field == f"chat.{field}".rstrip(".")
    assert words in violation.description


async def test_a_router_renders_all_of_it() -> None:
    source = (
        "{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.name }}{{ m.reasoning_content }}"
        "{{ m.tool_calls | tojson if m.tool_calls }}{{ m.tool_call_id }}{% endfor %}"
        "{{ tools[0].function.name }}{{ enable_thinking }}"
    )
    expected = (
        'systembe\nbriefuserred?Adaassistantwhy not[{"id": "c1", "type": "function", "function": {"name": "f", '
        '"arguments": {"z": 1}}}]toolc1fFalse'
    )
    model = replace(
        served_model(),
        text_tokenizer=TextTokenizer(byte_level_tokenizer(), ChatTemplate(source, {})),
    )
    fabric, journal = Fabric(), Journal()
    async with running_router(
        FakePrefill("p", fabric, journal), FakeDecode("d", fabric, journal), model=model
    ) as router:
        request = pb.GenerateRequest(
            chat=pb.ChatMessages(
                messages=TALK.messages[:4],
                tools=TALK.tools,
                template_arguments=TALK.template_arguments,
            )
        )
        del request.chat.messages[2].tool_calls[1]
        request.chat.messages[2].tool_calls[0].arguments = '{"z": 1}'
        request.stop.max_tokens = 1
        prompt = byte_level_tokenizer().encode(expected).ids
        answer = await router.ask(request)
        assert answer.token_ids == expected_tokens(prompt, 1)
        assert answer.finish is not None
        assert answer.finish.usage.prompt_tokens == len(prompt) < VOCAB_SIZE
        request.chat.template_arguments = "{"
        assert isinstance(await router.failure(request), InvalidRequestError)
