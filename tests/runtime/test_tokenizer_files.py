import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from runtime.errors import ConfigError
from runtime.model_files import tokenizer_conversion
from runtime.model_files.tokenizer_conversion import missing_packages
from runtime.model_files.tokenizer_files import find_tokenizer, make_tokenizer, tokenizer_digest

SAYS: dict[str, object] = {
    "model": {"vocab": {"a": 0, "b": 1}},
    "truncation": None,
    "added_tokens": [],
}


def digest(folder: Path, content: object, **options: object) -> str:
    (folder / "tokenizer.json").write_text(json.dumps(content, **options))  # type: ignore[arg-type]
    return tokenizer_digest(folder)


def test_the_fingerprint_depends_on_content_and_not_on_format(tmp_path: Path) -> None:
    first = digest(tmp_path, SAYS)
    assert len(first) == 16
    assert first == digest(tmp_path, dict(reversed(SAYS.items())), indent=4)
    assert first == digest(tmp_path, {**SAYS, "truncation": {"max_length": 5}, "padding": {}}), (
        "servers do neither"
    )
    assert first != digest(tmp_path, {**SAYS, "model": {"vocab": {"a": 1, "b": 0}}})
    assert first != digest(tmp_path, {**SAYS, "added_tokens": [{"id": 2}]})


def test_without_a_tokenizer_there_is_nothing_to_compare(tmp_path: Path) -> None:
    assert tokenizer_digest(tmp_path) == ""


@pytest.mark.parametrize("text", ["[]", "{"])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match=r"tokenizer\.json (must|cannot)"):
        tokenizer_digest(tmp_path)


def vocabulary(folder: Path) -> Path:
    """Write the files of a GPT-2 tokenizer: letters and one merge."""
    folder.mkdir()
    words = {
        word: place
        for place, word in enumerate(["<|endoftext|>", "a", "b", "c", "ab", "\u0120", "\u0120c"])
    }
    (folder / "vocab.json").write_text(json.dumps(words))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n\u0120 c\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    return folder


def test_a_tokenizer_is_built_from_its_files_without_writing_any(tmp_path: Path) -> None:
    model, cache = vocabulary(tmp_path / "model"), {"BATON_CACHE_DIR": str(tmp_path / "cache")}
    before = sorted(model.iterdir())
    assert find_tokenizer(model, cache) is None
    assert make_tokenizer(model, cache).endswith(
        "is used, which transformers made from its other files"
    )
    made = find_tokenizer(model, cache)
    assert made is not None
    assert made.is_relative_to(tmp_path / "cache")
    assert sorted(model.iterdir()) == before
    from transformers import (
        AutoTokenizer,
    )  # loads torch, which no test of this folder needs to be collected

    theirs = AutoTokenizer.from_pretrained(model)
    for text in ("abc", "ab c", "cab"):
        assert Tokenizer.from_file(str(made)).encode(text).ids == theirs(text)["input_ids"]
    written = made.stat().st_mtime_ns
    make_tokenizer(model, cache)
    assert made.stat().st_mtime_ns == written, "once"
    (model / "merges.txt").write_text("#version: 0.2\n")
    assert find_tokenizer(model, cache) is None, "of other files"


def sentencepiece_vocabulary(folder: Path) -> Path:
    """Write a tokenizer.model like Llama 2's and Mistral's: merged pairs and bytes for the rest."""
    import sentencepiece  # published without types, and no other test needs it

    folder.mkdir()
    lines = ["the red lantern near the old mill", "a red mill, an old lantern"] * 20
    with (folder / "tokenizer.model").open("wb") as out:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=out,
            vocab_size=300,
            model_type="bpe",
            byte_fallback=True,
            minloglevel=2,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
        )
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    return folder


def test_one_is_made_of_a_sentencepiece_model(tmp_path: Path) -> None:
    import sentencepiece

    model, cache = (
        sentencepiece_vocabulary(tmp_path / "model"),
        {"BATON_CACHE_DIR": str(tmp_path / "cache")},
    )
    assert make_tokenizer(model, cache).endswith(
        "is used, which transformers made from its other files"
    )
    made = find_tokenizer(model, cache)
    assert made is not None
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(model / "tokenizer.model"))
    ours = Tokenizer.from_file(str(made))
    for text in ("the old mill", "a größe 東京", "red  red"):
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text)


@pytest.mark.parametrize(
    ("file", "package"), [("tokenizer.model", "sentencepiece"), ("qwen.tiktoken", "tiktoken")]
)
def test_the_package_that_reads_a_vocabulary_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, package: str
) -> None:
    """transformers names tiktoken for any missing package."""
    (tmp_path / file).write_bytes(b"")
    monkeypatch.setattr(
        tokenizer_conversion, "find_spec", lambda name: None if name == package else object()
    )
    assert list(missing_packages(tmp_path)) == [(package, file)]
    monkeypatch.setattr("sys.argv", ["", str(tmp_path), str(tmp_path / "out")])
    with pytest.raises(
        SystemExit, match=rf"they need {package} for {file} \(pip install {package}\)"
    ):
        tokenizer_conversion.main()


def test_mistrals_own_format_is_named(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text("{}")
    notice = make_tokenizer(tmp_path, {"BATON_CACHE_DIR": str(tmp_path)})
    assert (
        "has no tokenizer.json but tekken.json, a format of Mistral's that is not supported: texts and"
        in notice
    )


def test_a_tokenizer_that_cannot_be_built_is_reported(tmp_path: Path) -> None:
    cache = {"BATON_CACHE_DIR": str(tmp_path / "cache")}
    (tmp_path / "none").mkdir()
    assert make_tokenizer(tmp_path / "none", cache) == (
        f"{tmp_path / 'none'} has no tokenizer.json: texts and chats are rejected, prompts must be token ids "
        f"(baton generate --ids 1,2,3)"
    )
    broken = vocabulary(tmp_path / "broken")
    (broken / "vocab.json").write_text("[")
    notice = make_tokenizer(broken, cache)
    assert "none could be made from its other files: transformers cannot read them: " in notice
    assert "\n" not in notice
    assert find_tokenizer(broken, cache) is None
    (broken / "tokenizer.json").write_text("{}")
    assert make_tokenizer(broken, cache) == ""
    assert find_tokenizer(broken, cache) == broken / "tokenizer.json"
