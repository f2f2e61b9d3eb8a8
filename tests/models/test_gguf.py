"""GGUF files become the checkpoints that they were made from."""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from runtime.errors import ConfigError
from runtime.gguf import convert as convert_module
from runtime.gguf.config import config_of
from runtime.gguf.convert import checkpoint_of, convert, converted_path, to_bfloat16
from runtime.gguf.metadata import GgufMetadata
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.gguf_files import add_tokenizer, write_gguf

K = gguf.GGMLQuantizationType
FAMILIES = (
    "llama_tied_bias",
    "llama_yarn",
    "llama_linear",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma3",
)
# Settings that a file has no key for: chance, training, other names of the same.
NOT_STORED = {
    "attention_dropout",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "layer_types",  # of Gemma, from its pattern
    "max_window_layers",
    "output_router_logits",
    "pad_token_id",
    "query_pre_attn_scalar",
    "router_aux_loss_coef",
    "sliding_window",
    "use_cache",
    "_name_or_path",
    "transformers_version",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_settings_are_those_of_the_source(tmp_path: Path, family: str) -> None:
    """Float32 is kept, so every value must be the same; only Gemma's norms pass through an addition."""
    source = make_checkpoint(tmp_path, family)
    made = tmp_path / "made"
    convert(write_gguf(source, tmp_path / "model.gguf"), made)
    expected, found = load_file(source / "model.safetensors"), load_file(made / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if family == "gemma3" and name.endswith("norm.weight"):
            assert torch.allclose(found[name], value, atol=1e-6), name
        else:
            assert torch.equal(found[name], value.float()), name
    wanted, got = (AutoConfig.from_pretrained(folder).to_dict() for folder in (source, made))
    differs = {
        key: (wanted.get(key), got.get(key))
        for key in wanted.keys() | got.keys()
        if wanted.get(key) != got.get(key) and key not in NOT_STORED
    }
    assert differs == {}
    assert got["dtype"] == "float32"
    assert json.loads((made / "generation_config.json").read_text())["eos_token_id"] == [2]


def test_gemmas_layers_alternate(tmp_path: Path) -> None:
    values = {
        "general.architecture": "gemma3",
        **{
            f"gemma3.{key}": value
            for key, value in {
                "embedding_length": 1152,
                "block_count": 26,
                "feed_forward_length": 6912,
                "context_length": 32768,
                "attention.head_count": 4,
                "attention.head_count_kv": 1,
                "attention.key_length": 256,
                "attention.value_length": 256,
                "attention.layer_norm_rms_epsilon": 1e-6,
                "attention.sliding_window": 512,
                "rope.freq_base": 1000000.0,
            }.items()
        },
    }
    made = config_of(GgufMetadata(values), 262144, frozenset(), None)
    layers = made["layer_types"]
    assert isinstance(layers, list)
    assert [index for index, kind in enumerate(layers) if kind == "full_attention"] == [
        5,
        11,
        17,
        23,
    ]
    assert made["query_pre_attn_scalar"] == 256
    assert made["tie_word_embeddings"] is True
    values["gemma3.block_count"] = 62
    values["gemma3.embedding_length"], values["gemma3.attention.head_count"] = 5376, 32
    assert (
        config_of(GgufMetadata(values), 262144, frozenset(), None)["query_pre_attn_scalar"] == 168
    )


@pytest.mark.parametrize(("factor", "head_dim"), [(8.0, 128), (32.0, 64)])
def test_llama_3s_scaling_is_found_in_its_factors(factor: float, head_dim: int) -> None:
    """llama.cpp stores base frequencies over scaled ones; transformers computes the latter."""
    theta = 500000.0
    rope = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(hidden_size=head_dim, num_attention_heads=1, rope_parameters=dict(rope))
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    base = theta ** -(torch.arange(0, head_dim, 2) / head_dim)
    values = {
        "general.architecture": "llama",
        "llama.embedding_length": head_dim,
        "llama.block_count": 1,
        "llama.feed_forward_length": 64,
        "llama.context_length": 131072,
        "llama.attention.head_count": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": theta,
    }
    factors = (base / scaled).float().numpy()
    assert config_of(GgufMetadata(values), 8, frozenset(), factors)["rope_parameters"] == rope
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight is not one of Llama 3's scalings"):
        config_of(GgufMetadata(values), 8, frozenset(), factors * 1.1)


TYPES = (
    *(K.F16, K.BF16, K.Q8_0, K.Q4_0, K.Q4_1, K.Q5_0, K.Q5_1, K.IQ4_NL, K.IQ4_XS),
    *(K.Q2_K, K.Q3_K, K.Q4_K, K.Q5_K, K.Q6_K),
)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_quantized_weights_are_the_librarys_in_bfloat16(tmp_path: Path, kind: K) -> None:
    """The oracle is llama.cpp's own Python code, and torch's rounding."""
    file, rng = tmp_path / "model.gguf", np.random.default_rng(0)
    rows, columns, heads = 64, 256, 4
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(columns)
    writer.add_feed_forward_length(64)
    writer.add_head_count(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(columns // heads)
    add_tokenizer(writer, rows)
    shape = gguf.quant_shape_to_byte_shape((rows, columns), kind)
    # Bytes below 0x3c make no scale infinite or NaN.
    stored = rng.integers(0, 0x3C, size=shape, dtype=np.uint8)
    if kind is K.F16:
        writer.add_tensor("token_embd.weight", stored.view(np.float16))
        stored = stored.view(np.float16)
    else:
        writer.add_tensor("token_embd.weight", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    convert(file, tmp_path / "made")
    found = load_file(tmp_path / "made" / "model.safetensors")["model.embed_tokens.weight"]
    expected = torch.from_numpy(dequantize(stored, kind).astype(np.float32)).to(torch.bfloat16)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)
    assert found.abs().sum() > 0


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
def test_rounding_is_torchs(bits: list[int]) -> None:
    values = np.array(bits, dtype=np.uint32).view(np.float32)
    ours = torch.from_numpy(to_bfloat16(values).view(np.int16)).view(torch.bfloat16)
    theirs = torch.from_numpy(values.copy()).to(torch.bfloat16)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.nan_to_num(0.0), theirs.nan_to_num(0.0))


def test_a_file_is_converted_once_into_the_cache(tmp_path: Path) -> None:
    file = write_gguf(make_checkpoint(tmp_path, "qwen3"), tmp_path / "model.gguf")
    environment, seen = {"BATON_CACHE_DIR": str(tmp_path / "cache")}, list[tuple[int, int]]()
    folder = checkpoint_of(file, environment, lambda done, total: seen.append((done, total)))
    assert folder.name == "model"
    assert seen[-1][0] == seen[-1][1] > 0
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert checkpoint_of(file, environment) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "model.gguf").symlink_to(file)
    assert checkpoint_of(alone, environment) == folder, "a folder with one file means it"
    assert checkpoint_of(folder, environment) == folder
    file.write_bytes(file.read_bytes() + b"more")
    assert checkpoint_of(file, environment) != folder, "another file is converted again"


def test_a_conversion_that_hangs_elsewhere_is_not_waited_for_forever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(make_checkpoint(tmp_path, "qwen3"), tmp_path / "model.gguf")
    environment = {"BATON_CACHE_DIR": str(tmp_path / "cache")}
    place = converted_path(file, environment).parent
    place.mkdir(parents=True)
    monkeypatch.setattr(convert_module, "CONVERSION_S", 0.3)
    with (place / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"another process has been converting it for 0\.3 s"):
            checkpoint_of(file, environment)
    assert checkpoint_of(file, environment).is_dir()


def _damaged(file: Path, change: Callable[[bytes], bytes]) -> Path:
    content = file.read_bytes()
    changed = file.with_name("damaged.gguf")
    changed.write_bytes(change(content))
    return changed


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda content: b"NOPE" + content[4:], "is not a GGUF file"),
        (lambda content: content[: len(content) // 2], "is damaged or cut off"),
        (lambda content: content[:100], "is damaged or cut off"),
        (lambda content: content[:8] + b"\xff" * 16 + content[24:], "is damaged or cut off"),
        (lambda content: content.replace(b"qwen3", b"qwenX"), "architecture 'qwenX' is not supported"),
        (lambda content: content.replace(b"attn_q.weight", b"attn_X.weight"), r"attn_X\.weight' .* unknown"),
        (lambda content: content.replace(b"default", b"another"), "ggml.pre 'another' is not supported"),
        (lambda content: content.replace(b"token_embd", b"token_lost"), r"'token_embd.weight' is missing"),
        (lambda content: content.replace(b"block_count", b"block_cxunt"), "block_count must be a number"),
    ],
)  # fmt: skip
def test_what_cannot_be_converted_is_one_error_and_leaves_nothing(
    tmp_path: Path,
    change: Callable[[bytes], bytes],
    said: str,
) -> None:
    file = _damaged(write_gguf(make_checkpoint(tmp_path, "qwen3"), tmp_path / "model.gguf"), change)
    with pytest.raises(ConfigError, match=said) as refused:
        convert(file, tmp_path / "made")
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.glob("*made*"))


def test_the_commands_convert_and_overwrite_nothing(tmp_path: Path) -> None:
    file, made = (
        write_gguf(make_checkpoint(tmp_path, "qwen3"), tmp_path / "model.gguf"),
        tmp_path / "made",
    )

    def baton(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "baton", *arguments],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            env={**os.environ, "BATON_CACHE_DIR": str(tmp_path / "cache")},
        )

    done = baton("convert", str(file), str(made))
    assert (done.returncode, done.stdout) == (0, f"{made} has the checkpoint\n")
    assert "converting model.gguf, once" in done.stderr
    done = baton("convert", str(file), str(made))
    assert (done.returncode, done.stderr) == (2, f"baton: {made} exists already\n")
    checked = baton("check", str(file))
    assert checked.returncode == 0
    assert checked.stdout.startswith("model: Qwen3ForCausalLM, 4 layers, runs in float32")
