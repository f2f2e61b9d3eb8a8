import json
from pathlib import Path

import pytest

from runtime.errors import ConfigError
from runtime.tokenizer_files import tokenizer_digest

SAYS: dict[str, object] = {"model": {"vocab": {"a": 0, "b": 1}}, "truncation": None, "added_tokens": []}


def digest(folder: Path, content: object, **options: object) -> str:
    (folder / "tokenizer.json").write_text(json.dumps(content, **options))  # type: ignore[arg-type]
    return tokenizer_digest(folder)


def test_what_it_says_counts_and_not_how_it_is_written(tmp_path: Path) -> None:
    first = digest(tmp_path, SAYS)
    assert len(first) == 16
    assert first == digest(tmp_path, dict(reversed(SAYS.items())), indent=4)
    assert first == digest(tmp_path, {**SAYS, "truncation": {"max_length": 5}, "padding": {}}), "servers do neither"
    assert first != digest(tmp_path, {**SAYS, "model": {"vocab": {"a": 1, "b": 0}}})
    assert first != digest(tmp_path, {**SAYS, "added_tokens": [{"id": 2}]})


def test_without_a_tokenizer_there_is_nothing_to_compare(tmp_path: Path) -> None:
    assert tokenizer_digest(tmp_path) == ""


@pytest.mark.parametrize("text", ["[]", "{"])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match=r"tokenizer\.json (must|cannot)"):
        tokenizer_digest(tmp_path)
