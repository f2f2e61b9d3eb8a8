"""Tokenizers of GGUF files encode as those that they were made from."""

import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from runtime.errors import ConfigError
from runtime.gguf.metadata import GgufMetadata
from runtime.gguf.tokenizer import tokenizer_of

TEXTS = (
    "Hello world, don't stop! It's 12345 o'clock.",
    "  two spaces, a\ttab\nand\r\n\r\nlines   ",
    "Größe naïve 漢字かな 한국어 🙂👩‍👩‍👧 é e\u0301 \u00a0x",
    "def f(x):\n    return x ** 2  # comment\n\n\n",
    "",
    " ",
    "<s>raw</s> and <|im_start|>user\nhi<|im_end|>",
)
SPECIAL = ("<|im_start|>", "<|im_end|>", "<s>")
CORPUS = [text * 3 for text in TEXTS] + ["the cat sat on the mat " * 20, "return self.value " * 20]
SPLITS = {
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


def trained(pre: str) -> Tokenizer:
    """Return a small byte-level tokenizer that splits as models with this `pre` do."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in SPLITS)
    before: list[Any] = {
        "smollm": [pre_tokenizers.Digits(individual_digits=True)],
        "gpt-2": [],
    }.get(pre, [])
    if pre in SPLITS:
        before = [pre_tokenizers.Split(Regex(SPLITS[pre]), behavior="isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, byte_level])
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def metadata_of(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
    }


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", *SPLITS])
def test_byte_level_tokenizers(pre: str) -> None:
    source = trained(pre)
    made = tokenizer_of(GgufMetadata(metadata_of(source, pre)))
    assert made.get_vocab() == source.get_vocab()
    for text in TEXTS:
        ids = source.encode(text).ids
        assert made.encode(text).ids == ids, text
        assert made.decode(ids, skip_special_tokens=False) == source.decode(
            ids, skip_special_tokens=False
        )


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_tokenizers(tmp_path: Path, *, prefix: bool) -> None:
    """The oracle is the library itself, on a model of its own: merges follow from scores."""
    (tmp_path / "corpus.txt").write_text("\n".join(" ".join(text.split()) for text in CORPUS))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "corpus.txt"),
        model_prefix=str(tmp_path / "m"),
        vocab_size=380,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.98,
        add_dummy_prefix=prefix,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    source = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    count = source.get_piece_size()
    kinds = [
        2
        if source.is_unknown(index)
        else 3
        if source.is_control(index)
        else 6
        if source.is_byte(index)
        else 1
        for index in range(count)
    ]
    made = tokenizer_of(
        GgufMetadata(
            {
                "general.architecture": "llama",
                "tokenizer.ggml.model": "llama",
                "tokenizer.ggml.tokens": [source.id_to_piece(index) for index in range(count)],
                "tokenizer.ggml.scores": [source.get_score(index) for index in range(count)],
                "tokenizer.ggml.token_type": kinds,
                "tokenizer.ggml.unknown_token_id": source.unk_id(),
                "tokenizer.ggml.bos_token_id": source.bos_id(),
                "tokenizer.ggml.add_space_prefix": prefix,
                "tokenizer.ggml.add_bos_token": True,
            }
        )
    )
    for text in TEXTS[:5]:
        ids = source.encode(text)
        assert made.encode(text, add_special_tokens=False).ids == ids, text
        assert made.encode(text).ids == [source.bos_id(), *ids]
        assert made.decode(ids) == source.decode(ids)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("model", "bert", "tokenizer 'bert' is not supported; supported are gpt2 and llama"),
        ("tokens", ["a", "a"], "tokens has a token twice"),
        ("tokens", None, "tokens must be a list"),
        ("token_type", [1], "token_type must be a list with one kind for each token"),
        ("bos_token_id", 10**6, "bos_token_id must be the id of a token, got 1000000"),
    ],
)
def test_what_is_wrong_is_named(key: str, value: object, said: str) -> None:
    values = metadata_of(trained("gpt-2"), "gpt-2") | {"tokenizer.ggml.add_bos_token": True}
    with pytest.raises(ConfigError, match=said):
        tokenizer_of(GgufMetadata(values | {f"tokenizer.ggml.{key}": value}))
