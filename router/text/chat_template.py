"""Rendering of conversations with a model's chat template, as transformers does.

Templates run in a sandbox, with the names that templates written for transformers expect. As in
transformers, null fields of a message are omitted, its reasoning has every name that templates use,
and a conversation with tools uses the `tool_use` template if a model has one. Unlike there,
contents get the form that the template accepts: text parts are joined if it would write them as a
Python list, and a text becomes a part if it writes only parts.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import Enum
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Const, Node, TemplateData
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.text.chat import Chat, MessageFields, as_parts, text_parts
from runtime.errors import ConfigError, FieldViolation, InvalidRequestError

DEFAULT = "default"
TOOL_USE = "tool_use"
# Names that every conversation defines; they cannot be template arguments.
RESERVED_ARGUMENTS = ("messages", "tools", "add_generation_prompt")
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_PROBE = "BATONPROBE"
_TAG = "BATON_CONTINUES_HERE "  # marks the end of a final message that the response continues
_REFUSALS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


class ContentForm(Enum):
    """Form in which a template accepts the content of a role's messages."""

    TEXT = "text"
    PARTS = "parts"
    EITHER = "either"


class ChatTemplate:
    """A model's rule for writing a conversation as one text."""

    def __init__(self, sources: str | Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Parse the templates. `sources` is one, or several by name, one of them `DEFAULT`.

        Raises:
            ConfigError: a template cannot be parsed.
        """
        self.sources = {DEFAULT: sources} if isinstance(sources, str) else dict(sources)
        self._special_tokens = dict(special_tokens)
        self.environment = _environment()
        self._forms: dict[str, ContentForm] = {}
        try:
            self._templates = {
                name: self.environment.from_string(text) for name, text in self.sources.items()
            }
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"the chat template cannot be parsed: {error}", field="model"
            ) from error

    def render(self, chat: Chat) -> str:
        """Return the conversation up to the beginning of the assistant's next turn, or to the end
        of its final message.

        Raises:
            InvalidRequestError: the template rejects these messages.
        """
        turns = [self._normal(turn) for turn in chat.messages]
        try:
            if chat.continue_final_message:
                return self._up_to_the_end_of(turns, chat)
            return self._render(turns, chat.tools, chat.arguments)
        except _REFUSALS as error:
            raise InvalidRequestError(
                FieldViolation("chat.messages", f"the chat template refuses them: {error}")
            ) from error

    def arguments(self) -> frozenset[str]:
        """Return the names used and not defined by the templates: their possible arguments."""
        given = {*self.environment.globals, *self._special_tokens, *RESERVED_ARGUMENTS}
        found = (
            jinja2.meta.find_undeclared_variables(self.environment.parse(text))
            for text in self.sources.values()
        )
        return frozenset[str]().union(*found) - given

    def literal_text(self) -> str:
        """Return all literal text of the templates, with pieces separated by NUL."""
        pieces: set[str] = set()
        for source in self.sources.values():
            tree = self.environment.parse(source)
            pieces.update(node.data for node in tree.find_all(TemplateData))
            pieces.update(
                node.value for node in tree.find_all(Const) if isinstance(node.value, str)
            )
        return "\0".join(pieces)

    def _render(
        self,
        turns: Sequence[MessageFields],
        tools: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        name = TOOL_USE if tools and TOOL_USE in self._templates else DEFAULT
        context = {"documents": None, **self._special_tokens, **arguments}
        return self._templates[name].render(
            {
                **context,
                "messages": list(turns),
                "tools": list(tools) or None,
                "add_generation_prompt": add_generation_prompt,
            }
        )

    def _normal(self, turn: MessageFields) -> dict[str, Any]:
        """Return a turn without null fields, with reasoning and content in the template's form."""
        normal = {name: value for name, value in turn.items() if value is not None}
        reasoning = next((normal[name] for name in _REASONING_NAMES if name in normal), None)
        if reasoning is not None:
            normal = {"thinking": reasoning, **normal, "reasoning_content": reasoning}
        if "content" in normal:
            normal["content"] = self._content(str(normal.get("role")), normal["content"])
        return normal

    def _content(self, role: str, content: object) -> object:
        form = self._form_of(role)
        texts = text_parts(content)
        if texts is not None and form is ContentForm.TEXT:
            content = "\n".join(texts)
        if isinstance(content, str) and form is ContentForm.PARTS:
            return as_parts([content])
        return content

    def _form_of(self, role: str) -> ContentForm:
        """Determine the form by rendering a message of that role in both forms."""
        if (known := self._forms.get(role)) is not None:
            return known
        if role not in _PROBES:  # not cached: clients may invent any number of roles
            return ContentForm.TEXT
        as_text = self._probe(role, _PROBE)
        in_parts = self._probe(role, as_parts([_PROBE]))
        form = ContentForm.TEXT
        # A template that writes parts as a Python list also writes their keys.
        if _PROBE in in_parts and in_parts.count("type") <= as_text.count("type"):
            form = ContentForm.EITHER if _PROBE in as_text else ContentForm.PARTS
        self._forms[role] = form
        return form

    def _probe(self, role: str, content: object) -> str:
        before, after = _PROBES[role]
        asked = {"role": role, "content": content, "tool_call_id": "call00001", "name": "f"}
        try:
            return self._render(
                [*map(self._normal, before), asked, *map(self._normal, after)], (), {}
            )
        except _REFUSALS:
            return ""

    def _up_to_the_end_of(self, turns: list[dict[str, Any]], chat: Chat) -> str:
        """Return the conversation up to the end of its final message.

        Raises:
            ValueError: the final message has no text.
        """
        final = turns[-1]
        text = final.get("content")
        if isinstance(text, list) and text and isinstance(text[-1].get("text"), str):
            final["content"] = [*text[:-1], {**text[-1], "text": text[-1]["text"] + _TAG}]
        elif isinstance(text, str):
            final["content"] = text + _TAG
        else:
            raise ValueError("the final message, which the response is to continue, has no text")
        rendered = self._render(turns, chat.tools, chat.arguments, add_generation_prompt=False)
        before, found, after = rendered.rpartition(_TAG.strip())
        if not found:
            raise ValueError("the final message, which the response is to continue, is not written")
        return before if after.startswith(" ") else before.rstrip()


def _turn(role: str, content: str, **more: object) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


_CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {}}}
# Messages before and after one of a role, for templates that require an order.
_PROBES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "system": ([], [_turn("user", "a")]),
    "developer": ([], [_turn("user", "a")]),
    "user": ([], []),
    "assistant": ([_turn("user", "a")], [_turn("user", "b")]),
    "tool": ([_turn("user", "a"), _turn("assistant", "", tool_calls=[_CALL])], []),
}


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,  # noqa: ANN401
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """Write plain JSON: jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class _GenerationTag(Extension):
    """`{% generation %}` block, which marks the assistant's part for training; rendered as its
    content.
    """

    tags = {"generation"}  # noqa: RUF012 - the type is jinja's

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
