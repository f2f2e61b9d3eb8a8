"""A tokenizer and a chat template for gateways that tokenize texts themselves.

Such a gateway gets its tokenizer from the router, renders chats itself and sends only token ids. A
template rendered by another library, or special tokens that a gateway omits, would change the
prompt. Therefore both files *carry* the texts to the router instead. The carrying tokenizer loses
no character and begins each piece of text with a mark; the carrying template writes a conversation
as JSON. So the router recovers the texts from the ids, and renders and tokenizes them as for its
own API.

Responses are decoded with the same vocabulary, except that no space is dropped at their beginning:
decoders drop one where a text begins, but a response continues a text.
"""

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from router.text.chat_template import DEFAULT, ChatTemplate
from router.text.token_bytes import token_bytes_of

MARK = "\x02baton\x03"
CHAT_KEY = "baton.v1.ChatMessages"
_SHOWN_IDS = 16  # upper bound of the mark's length in tokens
_SAMPLE = '{"Größe": "東京\n\n  \u00f1 n\u0303 \ufb01\tx👋🏽\x00", "x": [1, 2.5, null]} it\'s  END '


class TextCarrier:
    """Decoder of the texts that a carrying tokenizer encoded."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """`tokenizer` is the model's own."""
        model = tokenizer.model
        self._tokens = token_bytes_of(tokenizer)
        # An added token that is also an entry of the model may come from there, so it is spelled
        # like one.
        self._added = {
            token_id: token.content.encode()
            if token.special or model.token_to_id(token.content) is None
            else None
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
        }

    def text_of(self, token_ids: Sequence[int]) -> str | None:
        """Return the text that these ids carry; None if they carry none."""
        if self._tokens is None:
            return None
        of = self._tokens.of
        mark = MARK.encode()
        shown = b"".join(
            of(token_id) for token_id in token_ids[:_SHOWN_IDS] if token_id not in self._added
        )
        if not shown.startswith(mark):
            return None
        text = bytearray()
        piece = bytearray()
        for token_id in token_ids:
            if token_id in self._added:  # ends a piece of text; the next one begins with a mark
                text += piece.removeprefix(mark) + (self._added[token_id] or of(token_id))
                piece.clear()
            else:
                piece += of(token_id)
        return (text + piece.removeprefix(mark)).decode(errors="replace")

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text of a response."""
        return b"" if self._tokens is None else self._tokens.of(token_id)

    def carries(self, tokenizer: Tokenizer) -> bool:
        """Return whether a carrying tokenizer loses no character of a sample text."""
        added = [content.decode() for content in self._added.values() if content is not None]
        sample = _SAMPLE + "".join(added[:4]) + " \n"
        return self.text_of(tokenizer.encode(sample, add_special_tokens=False).ids) == sample


def carrying_tokenizer(tokenizer: Tokenizer, source: str) -> str | None:
    """Return the `tokenizer.json` of a carrying tokenizer, derived from the model's own.

    Returns None if the tokenizer cannot be converted. Takes seconds for large vocabularies.
    """
    fields = json.loads(source)
    for token in fields["added_tokens"]:
        token.update(lstrip=False, rstrip=False, single_word=False, normalized=False)
    spaces = _space_steps(fields.get("normalizer"))
    fields["normalizer"] = {
        "type": "Sequence",
        "normalizers": [*spaces, {"type": "Prepend", "prepend": MARK}],
    }
    for step in _steps(fields.get("pre_tokenizer"), "pretokenizers"):
        _add_no_space(step)
    decoders = [
        step for step in _steps(fields.get("decoder"), "decoders") if step["type"] != "Strip"
    ]
    for step in decoders:
        _add_no_space(step)
    fields["decoder"] = {"type": "Sequence", "decoders": decoders}
    fields.update(post_processor=None, truncation=None, padding=None)
    carrying = json.dumps(fields, ensure_ascii=False)
    return carrying if TextCarrier(tokenizer).carries(Tokenizer.from_str(carrying)) else None


def carrying_template(template: ChatTemplate) -> str:
    """Return a template that writes a conversation as JSON.

    The JSON is an object with the key `CHAT_KEY`. If the response is to continue the last message,
    that message's text follows the object.

    The model's own template comes first and is never rendered: gateways search it to find whether
    the model thinks, and how that is switched. So is a loop over the parts of contents, which shows
    them that contents need not be joined.
    """
    arguments = "".join(
        f'{{% if {name} is defined %}}, "{name}": {{{{ {name} | tojson }}}}{{% endif %}}'
        for name in sorted(template.arguments())
    )
    return (
        f"{{%- if false %}}{template.sources[DEFAULT]}{{% endif -%}}"
        "{%- if false %}"
        "{% for message in messages %}{% for part in message.content %}{% endfor %}{% endfor %}"
        "{% endif -%}"
        f'{{"{CHAT_KEY}": {{'
        '"tools": {% if tools is defined and tools is not none %}{{ tools | tojson }}{% else %}[]{% endif %}, '
        f'"arguments": {{"": 0{arguments}}}, '
        '"goes_on": {{ (not add_generation_prompt) | tojson }}, '
        '"messages": {{ messages | tojson }}}}'
        "{%- if not add_generation_prompt %}"
        "{%- if messages[-1].content is string %}{{ messages[-1].content }}"
        "{%- elif messages[-1].content %}{{ messages[-1].content[-1].text }}{% endif %}"
        "{%- endif -%}"
    )


def _space_steps(normalizer: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the steps of a normalizer that write spaces as another character."""
    return [
        step
        for step in _steps(normalizer, "normalizers")
        if step["type"] == "Replace" and step["pattern"] == {"String": " "}
    ]


def _steps(part: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """Return the single steps of a normalizer, a pre-tokenizer or a decoder."""
    if part is None:
        return []
    return (
        [step for inner in part[key] for step in _steps(inner, key)]
        if part["type"] == "Sequence"
        else [part]
    )


def _add_no_space(step: dict[str, Any]) -> None:
    """Keep a step from adding or dropping a space at the beginning of a text."""
    if step["type"] == "Metaspace":
        step.pop("add_prefix_space", None)
        step["prepend_scheme"] = "never"
    elif step["type"] == "ByteLevel":
        step["add_prefix_space"] = False
