"""End tokens, from the files in which checkpoints state them."""

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import ConfigError
from runtime.model_files.end_tokens import EndTokens, read_end_tokens

VOCAB_SIZE = 40
TOKENIZER = {
    "added_tokens": [{"id": 32, "content": "<|im_end|>"}, {"id": 50, "content": "<image>"}],
    "model": {"type": "BPE", "vocab": {"a": 0, "</s>": 7}, "merges": []},
}
UNIGRAM = {
    "added_tokens": [],
    "model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["</s>", -1.0], ["a", -2.0]]},
}


def ends(folder: Path, config: dict[str, Any], **files: dict[str, Any]) -> EndTokens:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return read_end_tokens(folder, config, VOCAB_SIZE)


@pytest.mark.parametrize(
    "stated", ["<|im_end|>", {"content": "<|im_end|>", "lstrip": False, "special": True}]
)
def test_the_tokenizers_token_ends_output_if_no_other_file_sets_one(
    tmp_path: Path, stated: object
) -> None:
    found = ends(tmp_path, {}, tokenizer=TOKENIZER, tokenizer_config={"eos_token": stated})
    assert (found.ids, str(found), found.notice) == ((32,), "32 (tokenizer_config.json)", "")


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, {"eos_token_id": 2}, (2, 7)),
        ({}, {"eos_token_id": 2}, (2, 7)),
        ({"eos_token_id": None}, {"eos_token_id": 2}, (2, 7)),
        ({"eos_token_id": []}, {"eos_token_id": 2}, (2, 7)),
        ({"eos_token_id": 5}, {"eos_token_id": 2}, (5, 7)),
        ({"eos_token_id": [5, 7, 5]}, {"eos_token_id": 2}, (5, 7)),
        (None, {"eos_token_id": 2, "text_config": {"eos_token_id": 3}}, (2, 7)),
        (None, {"eos_token_id": None, "text_config": {"eos_token_id": 3}}, (3, 7)),
        (None, {"eos_token_id": [], "text_config": {"eos_token_id": 3}}, (3, 7)),
        (None, {"text_config": {}}, (7,)),
    ],
)
def test_the_tokenizers_token_is_added_to_those_of_the_first_file(
    tmp_path: Path,
    generation: dict[str, Any] | None,
    config: dict[str, Any],
    expected: tuple[int, ...],
) -> None:
    files = {} if generation is None else {"generation_config": generation}
    assert (
        ends(
            tmp_path, config, tokenizer=TOKENIZER, tokenizer_config={"eos_token": "</s>"}, **files
        ).ids
        == expected
    )


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer": UNIGRAM, "tokenizer_config": {"eos_token": "</s>"}}, 1),
        ({"tokenizer": TOKENIZER, "special_tokens_map": {"eos_token": {"content": "</s>"}}}, 7),
        (
            {
                "tokenizer": TOKENIZER,
                "tokenizer_config": {},
                "special_tokens_map": {"eos_token": "</s>"},
            },
            7,
        ),
        (
            {
                "tokenizer_config": {
                    "eos_token": "</s>",
                    "added_tokens_decoder": {"9": {"content": "</s>"}},
                }
            },
            9,
        ),
    ],
)
def test_a_token_is_found_in_every_list_of_a_tokenizer(
    tmp_path: Path, files: dict[str, Any], expected: int
) -> None:
    assert ends(tmp_path, {}, **files).ids == (expected,)


@pytest.mark.parametrize(
    ("token", "why"),
    [
        ("<image>", "it is token 50, and the model has 40"),
        ("<|none|>", "the tokenizer has no such token"),
    ],
)
def test_a_token_that_the_model_cannot_draw_is_named(tmp_path: Path, token: str, why: str) -> None:
    found = ends(
        tmp_path, {"eos_token_id": 2}, tokenizer=TOKENIZER, tokenizer_config={"eos_token": token}
    )
    assert found.ids == (2,)
    assert found.notice == (
        f"tokenizer_config.json states the eos_token '{token}', at which no response ends: {why}"
    )


@pytest.mark.parametrize(
    "files", [{}, {"tokenizer_config": {"eos_token": None}}, {"generation_config": {}}]
)
def test_a_model_without_end_tokens_is_logged(tmp_path: Path, files: dict[str, Any]) -> None:
    found = ends(tmp_path, {}, **files)
    assert (found.ids, str(found)) == ((), "none")
    assert found.notice.startswith("no file of the model states an end-of-sequence token")
    assert "\n" not in found.notice


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        (
            {"generation_config": {"eos_token_id": VOCAB_SIZE}},
            "generation_config.json: eos_token_id must be ids from 0 to",
        ),
        (
            {"generation_config": {"eos_token_id": "2"}},
            "generation_config.json: eos_token_id must be ids",
        ),
        (
            {"generation_config": {"eos_token_id": [True]}},
            "generation_config.json: eos_token_id must be ids",
        ),
        ({"tokenizer_config": {"eos_token": 3}}, "tokenizer_config.json: eos_token must be a text"),
    ],
)
def test_an_invalid_token_is_refused(tmp_path: Path, files: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        ends(tmp_path, {}, **files)
    assert caught.value.field in ("eos_token_id", "eos_token")
