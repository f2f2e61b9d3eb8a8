"""Text that a gateway encodes with its tokenizer and template reaches the router unchanged,
character by character. The gateway itself is in tests/cluster/test_openai_texts.py."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from router.text.carrier import CHAT_KEY, MARK, TextCarrier, carrying_template, carrying_tokenizer
from router.text.chat_template import ChatTemplate
from tests.router.harness import byte_level_tokenizer
from tests.router.text.test_detokenizer import GEMMA, LLAMA_2, sentencepiece_like

PIECES = st.sampled_from(
    ["<s>", "<|im_end|>", "<tool>", " ", "\n", MARK, "Größe", "n\u0303", "\ufb01", "👋🏽", "the"]
)
texts = st.lists(PIECES | st.text(max_size=3), min_size=1, max_size=6).map("".join)


def byte_level() -> Tokenizer:
    """Build a tokenizer like Qwen's: a normalizer that changes texts, special tokens, and one that
    strips the space after it."""
    tokenizer = Tokenizer.from_str(byte_level_tokenizer().to_str())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(
        [AddedToken("<s>", special=True), AddedToken("<|im_end|>", rstrip=True, special=True)]
    )
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def sentencepiece(decoder: Any, before: bool) -> Tokenizer:  # noqa: ANN401, FBT001
    """Build a tokenizer like Llama 2's, or like Gemma's, which adds no space `before` a text."""
    tokenizer = sentencepiece_like(decoder)
    replaced = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), replaced]) if before else replaced
    )
    tokenizer.add_special_tokens(["<|im_end|>"])
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = sentencepiece_like(
        decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


KINDS = {
    "Qwen": byte_level(),
    "Llama 2": sentencepiece(LLAMA_2, before=True),
    "Gemma": sentencepiece(GEMMA, before=False),
    "Mistral": metaspace(),
}


def carried(tokenizer: Tokenizer) -> Tokenizer:
    source = carrying_tokenizer(tokenizer, tokenizer.to_str())
    assert source is not None
    return Tokenizer.from_str(source)


CARRYING = {name: carried(tokenizer) for name, tokenizer in KINDS.items()}


@given(texts)
@pytest.mark.parametrize("kind", KINDS)
def test_any_text_round_trips(kind: str, text: str) -> None:
    """The exception is SentencePiece's bar, which its tokenizers read as a space."""
    expected = text if kind == "Qwen" else text.replace("▁", " ")
    found = TextCarrier(KINDS[kind]).text_of(
        CARRYING[kind].encode(text, add_special_tokens=False).ids
    )
    if found is None:  # of a text that has nothing but tokens of its own
        assert not re.sub("<s>|<tool>|<.im_end.>", "", text)
    else:
        assert found == expected


@given(st.lists(st.integers(0, 300), max_size=40))
@pytest.mark.parametrize("kind", KINDS)
def test_ids_of_the_models_own_tokenizer_carry_nothing(kind: str, token_ids: list[int]) -> None:
    assert TextCarrier(KINDS[kind]).text_of(token_ids) is None
    assert TextCarrier(KINDS[kind]).text_of(KINDS[kind].encode("the red mill").ids) is None


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_decoded_as_after_a_prompt(kind: str) -> None:
    """A first space is part of an output."""
    tokenizer, carrying = KINDS[kind], CARRYING[kind]
    for text in (" the red mill", " Größe", "\n<tool>"):
        whole, before = (
            tokenizer.encode(part, add_special_tokens=False).ids for part in ("s" + text, "s")
        )
        assert whole[: len(before)] == before
        assert carrying.decode(whole[len(before) :]) == text


def test_texts_are_neither_cut_nor_padded() -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    ids = carried(tokenizer).encode("the red lantern near the old mill").ids
    assert TextCarrier(tokenizer).text_of(ids) == "the red lantern near the old mill"


def test_a_tokenizer_that_loses_characters_carries_none() -> None:
    lossy = Tokenizer(models.WordLevel({"the": 0, "<unk>": 1}, unk_token="<unk>"))
    lossy.decoder = decoders.ByteLevel()
    lossy.pre_tokenizer = pre_tokenizers.Whitespace()
    assert carrying_tokenizer(lossy, lossy.to_str()) is None
    unknown = sentencepiece_like(decoders.WordPiece())
    assert carrying_tokenizer(unknown, unknown.to_str()) is None


def test_the_template_renders_its_input() -> None:
    source = "{% if enable_thinking %}<think>{% endif %}{{ mood }}{{ bos_token }}{% for m in messages %}{% endfor %}"
    template = ChatTemplate(source, {"bos_token": "<s>"})
    written = carrying_template(template)
    assert source in written, "where gateways look for how a model thinks"
    environment = template.environment
    messages = [
        {"role": "user", "content": [{"type": "text", "text": 'a "quoted"\n<s>'}]},
        {"role": "assistant", "content": None},
    ]
    text = environment.from_string(written).render(
        messages=messages,
        tools=[{"x": 1}],
        add_generation_prompt=True,
        enable_thinking=False,
        bos_token="<s>",
    )
    assert json.loads(text) == {
        CHAT_KEY: {
            "tools": [{"x": 1}],
            "arguments": {"enable_thinking": False, "": 0},
            "goes_on": False,
            "messages": messages,
        }
    }
    text = environment.from_string(written).render(
        messages=messages[:1], add_generation_prompt=False
    )
    chat, end = json.JSONDecoder().raw_decode(text)
    assert (chat[CHAT_KEY]["tools"], chat[CHAT_KEY]["goes_on"], text[end:]) == (
        [],
        True,
        'a "quoted"\n<s>',
    )
