"""Paths that are no checkpoint are named for what they are."""

from pathlib import Path

import pytest

from runtime.errors import ConfigError
from runtime.model_files.model_folder import check_model_folder

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 988097824\n"


def folder(path: Path, **files: str) -> Path:
    path.mkdir(parents=True)
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text)
    return path


def refusal(path: Path, *, field: str = "model") -> str:
    with pytest.raises(ConfigError) as refused:
        check_model_folder(path, field=field)
    assert refused.value.field == field
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_checkpoint_is_one(tmp_path: Path) -> None:
    whole = folder(tmp_path / "whole", config__json="{}", model__safetensors="")
    check_model_folder(whole)
    sharded = folder(tmp_path / "sharded", config__json="{}")
    (sharded / "model-00001-of-00002.safetensors").touch()
    check_model_folder(sharded)
    merged = folder(
        tmp_path / "merged", config__json="{}", adapter_config__json="{}", model__safetensors=""
    )
    check_model_folder(merged)


def test_a_router_needs_no_weights(tmp_path: Path) -> None:
    facts = folder(tmp_path / "facts", config__json="{}")
    check_model_folder(facts, needs_weights=False)
    assert refusal(facts) == f"{facts} is not a model directory: it has no *.safetensors"


def test_a_name_on_the_hub_is_downloaded_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        "`hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B`, then --model Qwen3-0.6B"
        in refusal(Path("Qwen/Qwen3-0.6B"))
    )
    assert "then --draft head" in refusal(Path("owner/head"), field="draft")
    assert refusal(Path("/nowhere/at/all")) == (
        "/nowhere/at/all does not exist; --model takes the folder of a checkpoint"
    )


def test_pointers_of_git_lfs(tmp_path: Path) -> None:
    cloned = folder(
        tmp_path / "cloned", config__json="{}", model__safetensors=POINTER, tokenizer__json=POINTER
    )
    assert refusal(cloned) == (
        f"{cloned} has git-LFS pointers where files should be (model.safetensors, "
        f"tokenizer.json): run `git lfs pull` in it"
    )


def test_an_adapter_goes_with_its_model(tmp_path: Path) -> None:
    adapter = folder(
        tmp_path / "lora",
        adapter_config__json='{"base_model_name_or_path": "Qwen/Qwen3-0.6B"}',
        adapter_model__safetensors="",
    )
    assert (
        "an adapter (LoRA) of Qwen/Qwen3-0.6B, not a model: give Qwen/Qwen3-0.6B, and --adapters "
        "with the folder that lora is in" in refusal(adapter)
    )
    assert "LoRA) of its base model" in refusal(folder(tmp_path / "odd", adapter_config__json="[]"))


def test_other_formats(tmp_path: Path) -> None:
    gguf = folder(tmp_path / "gguf")
    (gguf / "model-q4.gguf").write_text("GGUF")
    for path in (gguf, gguf / "model-q4.gguf"):
        assert "model-q4.gguf is GGUF, llama.cpp's format" in refusal(path)
        assert f"run `baton convert {gguf / 'model-q4.gguf'} FOLDER`" in refusal(path)
    (gguf / "model-q8.gguf").write_text("GGUF")
    assert f"has 2 GGUF files: give --model one of them, such as {gguf}/model-q4.gguf" in refusal(
        gguf
    )
    assert "has its weights as pickles" in refusal(
        folder(tmp_path / "bin", config__json="{}", pytorch_model__bin="x")
    )
    assert "is a file; --model takes the folder" in refusal(tmp_path / "bin" / "config.json")


def test_a_folder_of_the_hubs_cache_names_its_snapshot(tmp_path: Path) -> None:
    cached = tmp_path / "models--Qwen--Qwen3-0.6B"
    snapshot = folder(cached / "snapshots" / "abc", config__json="{}")
    assert refusal(cached).endswith(f"give --model {snapshot}")
