"""End tokens are those that transformers reads of the same files, of the tokenizer and of the
generation config."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models
from transformers import AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedTokenizerFast

from runtime.model_files.end_tokens import read_end_tokens

CONFIG: dict[str, Any] = {"model_type": "llama", "eos_token_id": 4, "text_config": None}


def save_tokenizer(folder: Path, eos_token: str | AddedToken) -> None:
    tokenizer = Tokenizer(
        models.WordLevel({f"w{index}": index for index in range(8)}, unk_token="w0")
    )
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    made: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token=eos_token
    )
    made.save_pretrained(folder)


@pytest.mark.parametrize("eos_token", ["w3", "<|im_end|>", AddedToken("<|im_end|>", special=True)])
@pytest.mark.parametrize("generation", [None, {}, {"eos_token_id": 5}, {"eos_token_id": [5, 6]}])
def test_they_are_the_union_of_those_of_transformers(
    eos_token: str | AddedToken, generation: dict[str, Any] | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_tokenizer(tmp_path, eos_token)
    if generation is None:
        config = GenerationConfig.from_model_config(PretrainedConfig(**CONFIG))
    else:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        config = GenerationConfig.from_pretrained(tmp_path)
    stated = config.eos_token_id
    if (
        stated is None
        # here transformers stops: it reads config.json only where there is no generation_config.json
    ):
        stated = CONFIG["eos_token_id"]
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    expected = {*(stated if isinstance(stated, list) else [stated]), tokenizer.eos_token_id}
    assert set(read_end_tokens(tmp_path, CONFIG, 16).ids) == expected
