"""A model's own sampling, from generation_config.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import ConfigError
from runtime.model_files.sampling import SamplingDefaults, read_sampling_defaults


def read(folder: Path, content: object) -> SamplingDefaults:
    (folder / "generation_config.json").write_text(json.dumps(content))
    return read_sampling_defaults(folder)


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        # Qwen3's, Llama 3's and DeepSeek-R1's files.
        (
            {
                "do_sample": True,
                "temperature": 0.6,
                "top_k": 20,
                "top_p": 0.95,
                "eos_token_id": [151645, 151643],
            },
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        ),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),
        ({"repetition_penalty": 1.05, "min_p": 0.1}, {"repetition_penalty": 1.05, "min_p": 0.1}),
        ({"temperature": None, "top_k": -1, "top_p": 1}, {"top_k": 0, "top_p": 1.0}),
        (
            {"do_sample": False, "temperature": 0.9, "top_p": 0.6},
            {"temperature": 0.0, "top_p": 0.6},
        ),
        ({"do_sample": None, "max_new_tokens": 2048}, {}),
    ],
)
def test_values_of_the_file_are_the_defaults(
    tmp_path: Path, stated: dict[str, Any], expected: dict[str, float]
) -> None:
    assert read(tmp_path, stated).stated == expected


def test_a_model_without_a_file_states_nothing(tmp_path: Path) -> None:
    found = read_sampling_defaults(tmp_path)
    assert (found.stated, str(found), found.notice) == ({}, "none", "")


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("temperature", -0.1, "must be between 0 and 100"),
        ("temperature", "0.6", "must be between 0 and 100"),
        ("temperature", True, "must be between 0 and 100"),
        ("top_p", 0, "must be above 0 and at most 1"),
        ("top_p", 1.5, "must be above 0"),
        ("top_k", 2.5, "must be an integer from 0"),
        ("top_k", -2, "must be an integer"),
        ("top_k", 1 << 32, "must be an integer"),
        ("min_p", 2, "must be between 0 and 1"),
        ("repetition_penalty", 0, "must be above 0 and at most 10"),
        ("do_sample", "yes", "must be true or false"),
        ("temperature", float("nan"), "must be between 0 and 100"),
    ],
)
def test_an_impossible_value_is_one_clear_line(
    tmp_path: Path, field: str, value: object, rule: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, {field: value})
    line = str(caught.value)
    assert line.startswith(f"generation_config.json: {field} {rule}")
    assert line.endswith(
        "make the router ignore the file's sampling defaults (--generation-config none)"
    )
    assert "\n" not in line


def test_ignored_values_are_logged(tmp_path: Path) -> None:
    neutral = {
        "typical_p": 1.0,
        "num_beams": 1,
        "no_repeat_ngram_size": 0,
        "suppress_tokens": [],
        "guidance_scale": 1,
    }
    found = read(
        tmp_path,
        {**neutral, "no_repeat_ngram_size": 3, "suppress_tokens": [7], "guidance_scale": None},
    )
    assert found.notice == (
        "generation_config.json states no_repeat_ngram_size, suppress_tokens, which Baton does "
        "not apply"
    )
