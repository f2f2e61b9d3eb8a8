"""Tokenizers of published models: what streams is what decoding everything at once gives, and
gateways carry texts by them."""

import random

import pytest
from tokenizers import Tokenizer, decoders

from router.text.carrier import TextCarrier, carrying_tokenizer
from router.text.detokenizer import BytesDetokenizer, Detokenizers
from tests.support.texts.published import published_tokenizers

pytestmark = pytest.mark.long  # they are fetched
TEXTS = ("größe 東京 👋🏽 yellow", "  two\n\n", " x", "مرحبا привет", "def f(x):\n    return x")
ROUNDS = 3000


def at_once(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """Decode by the tokenizer itself; SentencePiece's byte tokens that are no UTF-8 are joined by
    hand."""
    if isinstance(tokenizer.decoder, decoders.ByteLevel):
        return tokenizer.decode(token_ids)
    special = {
        token_id
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if token.special
    }
    words = [
        tokenizer.id_to_token(token_id) or "" for token_id in token_ids if token_id not in special
    ]
    data = b"".join(
        bytes([int(word[3:5], 16)])
        if len(word) == 6 and word.startswith("<0x")
        else word.replace("▁", " ").encode()
        for word in words
    )
    text = data.decode(errors="replace").removeprefix(" ")
    assert "\ufffd" in text or text == tokenizer.decode(token_ids)
    return text


def test_a_stream_equals_decoding_at_once_after_any_prompt() -> None:
    draw = random.Random(3)
    for name, tokenizer in published_tokenizers().items():
        detokenizers, num_tokens = Detokenizers(tokenizer), tokenizer.get_vocab_size()
        assert isinstance(detokenizers.new(()), BytesDetokenizer)
        first_bytes = [
            token_id
            for token_id in range(512)
            if (tokenizer.id_to_token(token_id) or "")[:3] == "<0x"
        ]
        rare = first_bytes or list(range(300))
        special = list(tokenizer.get_added_tokens_decoder())
        for _ in range(ROUNDS):
            token_ids = [
                draw.choice(draw.choice((rare, special, range(num_tokens))))
                for _ in range(draw.randrange(9))
            ]
            token_ids += tokenizer.encode(draw.choice(TEXTS), add_special_tokens=False).ids[
                : draw.randrange(9)
            ]
            cut = draw.randrange(len(token_ids) + 1)
            before, whole = at_once(tokenizer, token_ids[:cut]), at_once(tokenizer, token_ids)
            detokenizer = detokenizers.new(token_ids[:cut])
            text = "".join(map(detokenizer.add, token_ids[cut:])) + detokenizer.finish()
            if not before.endswith("\ufffd"):  # else the output may end the character
                assert before + text == whole, (name, token_ids, cut)


def test_texts_are_carried() -> None:
    for name, tokenizer in published_tokenizers().items():
        source = carrying_tokenizer(tokenizer, tokenizer.to_str())
        assert source is not None, name
        carrying, carrier = Tokenizer.from_str(source), TextCarrier(tokenizer)
        for text in TEXTS:
            assert carrier.text_of(carrying.encode(text, add_special_tokens=False).ids) == text
