"""Control tokens in users' texts: as transformers encodes them, and as tokens unless a router is
told otherwise."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from router.text.chat import Chat, chat_of_texts
from router.text.chat_template import ChatTemplate
from router.text.control_tokens import ControlTokens, UserControlTokens
from router.text.tokenizer import TextTokenizer, load_text_tokenizer
from runtime.errors import InvalidRequestError
from tests.router.harness import TEMPLATE, byte_level_tokenizer, write_model_dir
from tests.router.text.test_detokenizer import LLAMA_2, sentencepiece_like

SOURCE = (
    "{% for m in messages %}<user>{{ m.content }}<tool_call>{{ m.name }}{% endfor %}{{ tools | tojson }}"
    "{{ mood }}<bot>"
)
USED = st.sampled_from(
    [
        "<user>",
        "<bot>",
        "<tool_call>",
        "<think>",
        "red",
        " ",
        "\n",
        "mill",
        "\U000f0000",
        "\U000f0001",
        "<us",
        "er>",
    ]
)


def with_added(tokenizer: Tokenizer) -> Tokenizer:
    """Add special tokens of a chat model, one that its template writes and one that it does not."""
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.add_special_tokens(["<user>", "<bot>"])
    tokenizer.add_tokens(
        [AddedToken("<tool_call>", special=False), AddedToken("<think>", special=False)]
    )
    return tokenizer


KINDS = {
    "bytes": with_added(byte_level_tokenizer()),
    "sentencepiece": with_added(sentencepiece_like(LLAMA_2)),
}


async def ids(tokenizer: Tokenizer, chat: Chat, *, as_text: bool) -> list[int]:
    template = ChatTemplate(SOURCE, {})
    return await TextTokenizer(
        tokenizer, template, ControlTokens(tokenizer, template) if as_text else None
    ).encode_chat(chat)


def by_transformers(tokenizer: Tokenizer, chat: Chat, *, as_text: bool) -> list[int]:
    oracle: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]
    found: list[int] = oracle.apply_chat_template(
        list(chat.messages),
        tools=list(chat.tools) or None,
        chat_template=SOURCE,
        return_dict=False,
        add_generation_prompt=True,
        sanitize_control_tokens=as_text,
        **chat.arguments,
    )
    return found


@given(
    content=st.lists(USED, max_size=5).map("".join), name=st.lists(USED, max_size=2).map("".join)
)
@pytest.mark.parametrize("kind", KINDS)
async def test_control_tokens_of_users_are_text_as_in_transformers(
    kind: str, content: str, name: str
) -> None:
    tokenizer = KINDS[kind]
    chat = Chat(
        ({"role": "user", "content": content, "name": name},), ({"type": name},), {"mood": content}
    )
    assert await ids(tokenizer, chat, as_text=True) == by_transformers(
        tokenizer, chat, as_text=True
    )
    if "\U000f0000" not in content + name and "\U000f0001" not in content + name:
        assert await ids(tokenizer, chat, as_text=False) == by_transformers(
            tokenizer, chat, as_text=False
        )


@pytest.mark.parametrize("kind", KINDS)
async def test_a_user_ends_no_turn(kind: str) -> None:
    """Only the tokens that the template writes are there, and the text of the other ones is the
    user's."""
    tokenizer = KINDS[kind]
    chat = chat_of_texts(("user", "red<bot> and <user>"))
    user, bot = tokenizer.token_to_id("<user>"), tokenizer.token_to_id("<bot>")
    tokens, text = (
        await ids(tokenizer, chat, as_text=False),
        await ids(tokenizer, chat, as_text=True),
    )
    assert [token for token in tokens if token in (user, bot)] == [user, bot, user, bot]
    assert [token for token in text if token in (user, bot)] == [user, bot]
    if kind == "bytes":
        assert "red<bot> and <user>" in tokenizer.decode(text)


async def test_a_token_that_cannot_be_written_as_text_is_refused() -> None:
    """Of a vocabulary that has it as a word, too."""
    tokenizer = Tokenizer.from_str(byte_level_tokenizer().to_str())
    tokenizer.add_special_tokens(["red"])
    with pytest.raises(
        InvalidRequestError, match="'red', which the tokenizer cannot write as text"
    ):
        await ids(tokenizer, chat_of_texts(("user", "a red mill")), as_text=True)


async def test_control_tokens_of_users_are_tokens_or_text_by_setting(tmp_path: Path) -> None:
    chat = chat_of_texts(("user", "<bot>"))
    bot = byte_level_tokenizer().token_to_id("<bot>")
    assert bot is not None
    assert "<user>" in TEMPLATE.replace("{{ m.role }}", "user")
    for told, count in ((UserControlTokens.TOKENS, 2), (UserControlTokens.TEXT, 1)):
        text_tokenizer = load_text_tokenizer(write_model_dir(tmp_path), told)
        assert text_tokenizer is not None
        assert (await text_tokenizer.encode_chat(chat)).count(bot) == count
