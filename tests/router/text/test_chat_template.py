"""Conversations to text: as transformers renders them, and where it would write no text, as text
all the same."""

from collections.abc import Mapping
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from router.text.chat import Chat, as_parts, chat_of_texts
from router.text.chat_template import ChatTemplate
from runtime.errors import ConfigError, InvalidRequestError
from tests.router.harness import byte_level_tokenizer

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = {
    "turns": "{{ bos_token }}{% for message in messages %}\n<|{{ message['role'] }}|>{{ message.content | trim }}"
    "{{ eos_token }}\n{% endfor %}\n{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "json": "{{ messages | tojson }}|{{ messages | tojson(indent=2) }}",
    "loop control": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}"
    "{% if loop.last %}!{% endif %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "generation tag": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "tools": "{% if tools %}tools{% else %}{{ messages[0]['content'] }}{% endif %}",
}
CHAT = chat_of_texts(("system", "Be <b>brief</b> & 'kind'."), ("user", " größe \n"))


def by_transformers(template: Any, chat: Chat) -> str:  # noqa: ANN401 - a text, or several by name
    oracle: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=byte_level_tokenizer(), chat_template=template, **TOKENS
    )
    rendered: str = oracle.apply_chat_template(
        list(chat.messages),
        tools=list(chat.tools) or None,
        tokenize=False,
        add_generation_prompt=not chat.continue_final_message,
        continue_final_message=chat.continue_final_message,
        **chat.arguments,
    )
    return rendered


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(name: str) -> None:
    assert ChatTemplate(TEMPLATES[name], TOKENS).render(CHAT) == by_transformers(
        TEMPLATES[name], CHAT
    )


def test_a_template_can_refuse_messages() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidRequestError, match="roles must alternate") as caught:
        template.render(CHAT)
    assert caught.value.violations[0].field == "chat.messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ range(10 ** 12) }}",
        "{{ 1 // 0 }}",
        "{{ 'a' * 10 ** 15 }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(InvalidRequestError):
        ChatTemplate(source, {}).render(CHAT)


def test_a_broken_template_is_found_at_the_start() -> None:
    with pytest.raises(ConfigError, match="chat template"):
        ChatTemplate("{% for %}", {})


CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ASKED = {"role": "user", "content": "red?"}
# What published templates do with a turn, in short: GLM and MiniMax write what there is, Ministral
# 3 refuses what it does not know, Gemma 4 writes contents by a macro.
NULLS = {
    "writes": "{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}",
    "tests": "{% for m in messages %}{% if m.content is defined %}{{ m.content | trim }}{% endif %}|{% endfor %}",
    "refuses": "{% for m in messages %}{% if m.content is defined and m.content is not string %}"
    "{{ raise_exception('no text') }}{% endif %}{{ m.content }}{% endfor %}",
}


@pytest.mark.parametrize("name", NULLS)
def test_null_fields_are_left_out_as_in_transformers(name: str) -> None:
    chat = Chat(
        (
            ASKED,
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": None},
        )
    )
    rendered = ChatTemplate(NULLS[name], TOKENS).render(chat)
    assert rendered == by_transformers(NULLS[name], chat)
    assert "None" not in rendered


@pytest.mark.parametrize("given", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_the_name_that_a_template_reads(given: str) -> None:
    template = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.content }}{% endfor %}"
    chat = Chat(({"role": "assistant", "content": "4", given: "2 + 2"},))
    assert (
        ChatTemplate(template, TOKENS).render(chat)
        == by_transformers(template, chat)
        == "2 + 2|2 + 2|4"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"enable_thinking": False},
        {"bos_token": "!"},
        {"enable_thinking": True, "documents": [{"a": 1}]},
    ],
)
def test_arguments_reach_the_template(arguments: Mapping[str, Any]) -> None:
    template = (
        "{{ bos_token }}{% if enable_thinking is defined and not enable_thinking %}no{% endif %}"
        "{{ documents }}{{ messages[0].content }}"
    )
    chat = Chat((ASKED,), arguments=arguments)
    assert ChatTemplate(template, TOKENS).render(chat) == by_transformers(template, chat)


def test_template_parameters_are_detected() -> None:
    source = (
        "{% set loop = 1 %}{% if tools %}{{ tool_choice }}{% endif %}{{ bos_token }}{{ raise_exception }}"
        "{% for m in messages %}{{ m.x }}{% set seen = m %}{% endfor %}"
        "{% set enable_thinking = enable_thinking | default(true) %}"
    )
    assert ChatTemplate(source, TOKENS).arguments() == {"tool_choice", "enable_thinking"}


def test_tools_choose_the_template_of_their_purpose() -> None:
    named = {"default": "plain", "tool_use": "{{ tools | tojson }}", "rag": "documents"}
    template = ChatTemplate(named, TOKENS)
    for chat in (Chat((ASKED,)), Chat((ASKED,), (TOOL,))):
        assert template.render(chat) == by_transformers(named, chat)


EACH = "{% for m in messages %}[{{ m.role }}]"
CONTENTS: dict[str, tuple[Any, ...]] = {
    # the template; by hand what comes of a text in one part, in two, and as a text; which of these
    # transformers has
    "texts only": (EACH + "{{ m.content }}{% endfor %}", "[user]a", "[user]a\nb", "[user]a", (2,)),
    "texts that are added": (
        EACH + "{{ '' + m.content }}{% endfor %}",
        "[user]a",
        "[user]a\nb",
        "[user]a",
        (2,),
    ),
    "texts as JSON": (
        EACH + "{{ m.content | tojson }}{% endfor %}",
        '[user]"a"',
        '[user]"a\\nb"',
        '[user]"a"',
        (2,),
    ),
    "parts only": (
        EACH + "{% for p in m.content %}{{ p.text }};{% endfor %}{% endfor %}",
        "[user]a;",
        "[user]a;b;",
        "[user]a;",
        (0, 1),
    ),
    "either": (
        EACH
        + "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }};"
        "{% endfor %}{% endif %}{% endfor %}",
        "[user]a;",
        "[user]a;b;",
        "[user]a",
        (0, 1, 2),
    ),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_contents_have_the_form_that_the_template_takes(name: str) -> None:
    source, *expected, as_in_transformers = CONTENTS[name]
    template = ChatTemplate(source, TOKENS)
    chats = [
        Chat(({"role": "user", "content": content},))
        for content in (as_parts(["a"]), as_parts(["a", "b"]), "a")
    ]
    assert [template.render(chat) for chat in chats] == expected
    for place in as_in_transformers:
        assert by_transformers(source, chats[place]) == expected[place]


def test_each_role_has_a_form_of_its_own() -> None:
    """Gemma 4's macro writes the parts of users, and its first lines what a system message is."""
    source = (
        "{% if messages[0].role == 'system' %}{{ messages[0].content }}|{% endif %}"
        "{% for m in messages if m.role != 'system' %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
    )
    chat = Chat(
        (
            {"role": "system", "content": as_parts(["be", "brief"])},
            {"role": "user", "content": as_parts(["a", "b"])},
        )
    )
    assert ChatTemplate(source, TOKENS).render(chat) == "be\nbrief|ab"
    assert by_transformers(source, chat).startswith("[{'type'")


def test_roles_that_clients_invent_are_no_reason_to_remember_them() -> None:
    template = ChatTemplate(EACH + "{{ m.content }}{% endfor %}", TOKENS)
    for number in range(20):
        template.render(Chat(({"role": f"wizard {number}", "content": as_parts(["a"])},)))
    assert template._forms == {}


TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content TRIMMED}}{{ eos_token }}{% endfor %}{% if "
    "add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize("trim", ["", "| trim"])
@pytest.mark.parametrize("content", ["It is", "It is ", 'He said: "4\n"', as_parts(["It is"])])
def test_an_output_continues_the_final_message(trim: str, content: Any) -> None:  # noqa: ANN401
    source = TURNS.replace("TRIMMED", trim)
    if isinstance(content, list):
        source = source.replace(
            "m.content ", "m.content[0].text " if not trim else "m.content[0].text"
        )
        chat = Chat(({"role": "assistant", "content": content},), continue_final_message=True)
    else:
        chat = Chat((ASKED, {"role": "assistant", "content": content}), continue_final_message=True)
    assert ChatTemplate(source, TOKENS).render(chat) == by_transformers(source, chat)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "assistant", "tool_calls": [CALL]}, "has no text"),
        ({"role": "assistant", "content": ""}, ""),
    ],
)
def test_a_final_message_without_text_cannot_be_continued(
    message: dict[str, Any], words: str
) -> None:
    template, chat = (
        ChatTemplate(TURNS.replace("TRIMMED", ""), TOKENS),
        Chat((message,), continue_final_message=True),
    )
    if words:
        with pytest.raises(InvalidRequestError, match=words):
            template.render(chat)
    else:
        assert template.render(chat) == "<assistant>"


def test_a_final_message_that_the_template_drops_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="is not written"):
        ChatTemplate("nothing", TOKENS).render(Chat((ASKED,), continue_final_message=True))
