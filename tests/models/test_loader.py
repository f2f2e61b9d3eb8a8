"""Loading: each stage reads its own tensors only, and mismatches are named."""

import json
import os
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.core.layer_range import LayerRange
from engine.core.numerics import Numerics
from engine.memory.layout import CacheKind
from models import checkpoint_part
from models.checkpoint_part import stage_entries
from models.loader import random_model, read_model
from router.text.model_facts import load_served_model
from runtime.errors import ConfigError
from runtime.model_files.config import read_config
from runtime.model_files.end_tokens import read_end_tokens
from runtime.model_files.weights import loaded_bytes
from tests.models.conftest import CheckpointMaker
from tests.support.models.checkpoints import FAMILY_NAMES, make_checkpoint, oracle
from tests.support.models.single_stage import StageDriver


def edit_tensors(folder: Path, added: dict[str, Tensor], *, drop: str = "") -> None:
    tensors = load_file(folder / "model.safetensors") | {
        name: tensor.clone() for name, tensor in added.items()
    }
    save_file(
        {name: tensor for name, tensor in tensors.items() if name != drop},
        folder / "model.safetensors",
    )


def load_all(folder: Path) -> None:
    model = read_model(folder)
    model.load_stage(LayerRange(0, model.facts.num_layers), numerics=Numerics.EXACT)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_stages_take_every_tensor_once_s4_5(name: str, checkpoint: CheckpointMaker) -> None:
    model = read_model(checkpoint(name))
    assert model.checkpoint is not None
    whole = stage_entries(model.checkpoint, model.spec, LayerRange(0, model.facts.num_layers))
    bounds = range(model.facts.num_layers + 1)
    stages = [
        stage_entries(model.checkpoint, model.spec, LayerRange(a, b)) for a, b in pairwise(bounds)
    ]
    taken = [entry for stage in stages for entry in stage]
    twice = {entry for entry in taken if taken.count(entry) > 1}
    assert set(taken) == set(whole)
    assert twice == ({"embed_tokens.weight"} if model.spec.tied_head else set())
    assert "embed_tokens.weight" in stages[0]
    assert "norm.weight" in stages[-1]


@pytest.mark.parametrize("shard_bytes", [0, 60_000])
def test_a_middle_stage_reads_only_its_own_bytes_s0_9(
    shard_bytes: int, checkpoint: CheckpointMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint("qwen3", shard_bytes=shard_bytes)
    model = read_model(path)
    assert model.checkpoint is not None
    own = {
        key: entry
        for key, entry in model.checkpoint.entries.items()
        if key.startswith("model.layers.2.")
    }
    reads: list[tuple[str, int, int]] = []
    original = os.preadv

    def recording(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = original(descriptor, buffers, offset)
        reads.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, offset, count))
        return count

    monkeypatch.setattr(os, "preadv", recording)
    model.load_stage(LayerRange(2, 3), numerics=Numerics.EXACT)
    stored = [part for entry in own.values() for part in entry.stored]
    assert sorted(reads) == sorted((part.file.name, part.offset, part.num_bytes) for part in stored)
    if shard_bytes:
        assert len(list(path.glob("*.safetensors"))) > 3


def test_sharded_and_single_file_load_the_same(checkpoint: CheckpointMaker) -> None:
    single, sharded = (
        StageDriver(read_model(checkpoint("qwen3", shard_bytes=size))) for size in (0, 60_000)
    )
    assert torch.equal(single.prefill({0: [5, 6, 7]}), sharded.prefill({0: [5, 6, 7]}))


def test_a_separate_head_is_used_despite_the_config(
    checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    """As transformers does: a copy of the embedding is the embedding, a head that was trained is a
    head."""
    folder = Path(shutil.copytree(checkpoint("llama_tied_bias"), tmp_path / "model"))
    tied = StageDriver(read_model(folder)).prefill({0: [5, 6, 7]})
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(folder, {"lm_head.weight": embedding})
    assert torch.equal(StageDriver(read_model(folder)).prefill({0: [5, 6, 7]}), tied)
    edit_tensors(folder, {"lm_head.weight": -embedding})
    torch.testing.assert_close(StageDriver(read_model(folder)).prefill({0: [5, 6, 7]}), -tied)
    last = embedding.clone()
    last[-1, -1] += 1.0
    edit_tensors(folder, {"lm_head.weight": last})
    assert not read_model(folder).spec.tied_head


def test_names_of_other_models_in_the_file_are_not_layers_s4_5(
    checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoint("qwen3_5"), tmp_path / "model"))
    stray = torch.full((64, 64), 7.0)
    edit_tensors(
        folder,
        {
            "mtp.layers.0.mlp.up_proj.weight": stray,
            "model.visual.layers.0.norm.weight": stray,
            "model.language_model.layers.0.self_attn.rotary_emb.inv_freq": stray,
        },
    )
    expected = StageDriver(read_model(checkpoint("qwen3_5"))).prefill({0: [5, 6, 7]})
    assert torch.equal(StageDriver(read_model(folder)).prefill({0: [5, 6, 7]}), expected)


def test_a_wrapper_saved_as_its_text_model_keeps_the_wrapper_keys(
    checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoint("qwen3_5"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())["text_config"] | {
        "architectures": ["Qwen3_5ForCausalLM"]
    }
    (folder / "config.json").write_text(json.dumps(config))
    expected = StageDriver(read_model(checkpoint("qwen3_5"))).prefill({0: [5, 6, 7]})
    assert torch.equal(StageDriver(read_model(folder)).prefill({0: [5, 6, 7]}), expected)


def test_everything_that_does_not_fit_is_named_at_once(broken: Path) -> None:
    edit_tensors(
        broken,
        {"model.layers.2.mlp.extra.weight": torch.zeros(2), "model.norm.weight": torch.zeros(63)},
        drop="model.layers.1.mlp.up_proj.weight",
    )
    with pytest.raises(ConfigError) as caught:
        load_all(broken)
    message = str(caught.value)
    assert "missing: layers.1.mlp.up_proj.weight" in message
    assert "unexpected: layers.2.mlp.extra.weight" in message
    assert "norm.weight is [63], the config says [72]" in message


def test_layers_past_the_config_are_unexpected(broken: Path) -> None:
    edit_tensors(broken, {"model.layers.4.input_layernorm.weight": torch.ones(72)})
    with pytest.raises(ConfigError, match=r"unexpected: layers\.4\.input_layernorm"):
        load_all(broken)


@pytest.mark.parametrize("kept", [0.5, 0.01, 0.0])
def test_a_truncated_file_is_refused(broken: Path, kept: float) -> None:
    file = broken / "model.safetensors"
    os.truncate(file, int(file.stat().st_size * kept))
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        load_all(broken)


@pytest.mark.parametrize(
    "garbage",
    [b"", b"\x08", b"\x08" + b"\0" * 7 + b'{"a": 1}', b"\xff" * 64, b"\x02" + b"\0" * 7 + b"[]"],
)
def test_a_file_that_is_not_safetensors_is_refused(broken: Path, garbage: bytes) -> None:
    (broken / "model.safetensors").write_bytes(garbage)
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        load_all(broken)


def test_a_missing_shard_is_named(checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint("qwen3", shard_bytes=60_000), tmp_path / "model"))
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ConfigError, match=shard.name):
        read_model(folder)


def test_quantized_weights_are_refused(broken: Path) -> None:
    edit_tensors(
        broken,
        {"model.layers.0.mlp.up_proj.weight": torch.zeros(104, 72, dtype=torch.float8_e4m3fn)},
    )
    with pytest.raises(ConfigError, match="F8_E4M3"):
        load_all(broken)


def test_revision_follows_config_and_tensors_not_the_folder(
    checkpoint: CheckpointMaker, broken: Path
) -> None:
    original = read_model(checkpoint("llama")).facts.revision
    assert read_model(broken).facts.revision == original
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(
        json.dumps(config | {"transformers_version": "9"}, indent=7)
    )
    assert read_model(broken).facts.revision == original
    (broken / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert read_model(broken).facts.revision != original
    (broken / "config.json").write_text(json.dumps(config))
    edit_tensors(broken, {"model.norm.weight": torch.ones(72, dtype=torch.bfloat16)})
    assert read_model(broken).facts.revision != original, (
        "their bytes are digested while they are read"
    )


def test_facts_and_caches_of_a_hybrid(checkpoint: CheckpointMaker) -> None:
    model = read_model(checkpoint("qwen3_5"))
    facts = model.facts
    assert (facts.architecture, facts.num_layers, facts.chunk_grid) == (
        "Qwen3_5ForConditionalGeneration",
        4,
        64,
    )
    assert (facts.vocab_size, facts.hidden_size, facts.max_context_tokens, facts.dtype) == (
        257,
        72,
        512,
        "float32",
    )
    shapes = [
        (spec.layer_id, spec.kind, spec.record_shape, spec.dtype) for spec in model.cache_specs(16)
    ]
    recurrent = [(CacheKind.CONV, (3, 160), "float32"), (CacheKind.STATE, (4, 16, 24), "float32")]
    assert shapes == [(layer_id, *spec) for layer_id in range(3) for spec in recurrent] + [
        (3, CacheKind.KV, (2, 2, 16, 32), "float32")
    ]


IM_END = {
    "added_tokens": [{"id": 9, "content": "<|im_end|>"}],
    "model": {"type": "BPE", "vocab": {}, "merges": []},
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (2,)),
        ({"generation_config": {"eos_token_id": [7, 9, 7]}}, (7, 9)),
        ({"generation_config": {"temperature": 1}}, (2,)),
        ({"generation_config": {"eos_token_id": 5}}, (5,)),
        ({"generation_config": {"eos_token_id": []}}, (2,)),
        ({"tokenizer": IM_END, "tokenizer_config": {"eos_token": "<|im_end|>"}}, (2, 9)),
        (
            {"tokenizer": IM_END, "special_tokens_map": {"eos_token": {"content": "<|im_end|>"}}},
            (2, 9),
        ),
        (
            {
                "generation_config": {},
                "config": {"eos_token_id": 3, "text_config": {"eos_token_id": 4}},
            },
            (3,),
        ),
    ],
)
def test_routers_and_workers_have_the_same_eos_ids(
    broken: Path, files: dict[str, dict[str, Any]], expected: tuple[int, ...]
) -> None:
    """Answers must end where a worker's grammar ends a text, and routers refuse workers that end
    them elsewhere."""
    config = json.loads((broken / "config.json").read_text())
    for name, content in files.items():
        if name == "config":
            content = {**config, **content, "text_config": {**config, **content["text_config"]}}
        (broken / f"{name}.json").write_text(json.dumps(content))
    end_token_ids = read_end_tokens(broken, read_config(broken), 256).ids
    assert read_model(broken).facts.eos_token_ids == end_token_ids == expected
    if "tokenizer" not in files:  # of which there is only as much as states the token
        assert load_served_model(broken).facts.eos_token_ids == expected


def test_eos_ids_outside_the_vocabulary_are_refused(broken: Path) -> None:
    (broken / "generation_config.json").write_text(json.dumps({"eos_token_id": 10**6}))
    with pytest.raises(ConfigError, match="eos_token_id must be ids from 0 to 256, got 1000000"):
        read_model(broken)


def test_config_and_weights_that_are_no_files_are_named(broken: Path) -> None:
    (broken / "model.safetensors").unlink()
    (broken / "model.safetensors").mkdir()
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        read_model(broken)
    (broken / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        read_model(broken)


def test_random_model_needs_no_files_and_repeats(checkpoint: CheckpointMaker) -> None:
    config = json.loads((checkpoint("qwen3_5_text") / "config.json").read_text())
    model = random_model(config)
    whole, cut = StageDriver(model), StageDriver(random_model(config), cuts=(1, 3))
    logits = whole.prefill({0: [5, 6, 7]})
    assert torch.isfinite(logits).all()
    assert torch.equal(cut.prefill({0: [5, 6, 7]}), logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_config_without_a_dtype_runs_in_that_of_its_weights(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """And says so. transformers takes the same."""
    path = make_checkpoint(tmp_path, "llama", dtype=dtype)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if name != "dtype"})
    )
    model = read_model(path)
    assert (
        model.facts.dtype
        == str(oracle(path).dtype).removeprefix("torch.")
        == str(dtype).removeprefix("torch.")
    )
    assert model.notices == (
        f"{path / 'config.json'} states no dtype: the model runs in the dtype of its weights, "
        f"{model.facts.dtype}",
    )


def test_an_index_that_was_left_over_is_not_followed(
    checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    """Of a model whose shards were joined; transformers reads the one file then."""
    single, sharded = checkpoint("qwen3"), checkpoint("qwen3", shard_bytes=60_000)
    folder = Path(shutil.copytree(single, tmp_path / "model"))
    shutil.copy(sharded / "model.safetensors.index.json", folder)
    model = read_model(folder)
    assert torch.equal(
        StageDriver(model).prefill({0: [5, 6, 7]}),
        StageDriver(read_model(single)).prefill({0: [5, 6, 7]}),
    )
    (notice,) = model.notices
    assert "the index is ignored, and only model.safetensors is read" in notice
    assert loaded_bytes(folder) == loaded_bytes(single)
    assert torch.equal(oracle(folder).lm_head.weight, oracle(single).lm_head.weight)


def test_an_index_that_lists_the_single_file_is_followed(
    checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoint("qwen3"), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    last = {name: tensors.pop(name) for name in [name for name in tensors if ".layers.3." in name]}
    save_file(tensors, folder / "model.safetensors")
    save_file(last, folder / "more.safetensors")
    weight_map = dict.fromkeys(tensors, "model.safetensors") | dict.fromkeys(
        last, "more.safetensors"
    )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    load_all(folder)
    assert read_model(folder).notices == ()


@pytest.mark.parametrize("family", ["llama_tied_bias", "qwen3_moe", "deepseek_v3"])
def test_progress_of_reading_ends_at_the_bytes_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Of a stage only its own bytes; stacks of experts are counted by entry."""
    monkeypatch.setattr(checkpoint_part, "REPORT_S", 0.0)
    model = read_model(make_checkpoint(tmp_path, family))
    reports: list[tuple[int, int]] = []
    layers = LayerRange(0, model.facts.num_layers)
    model.load_stage(layers, numerics=Numerics.EXACT, report=lambda *counts: reports.append(counts))
    assert model.checkpoint is not None
    entries = stage_entries(model.checkpoint, model.spec, layers).values()
    stored = sum(each.num_bytes for entry in entries for each in entry.stored)
    assert reports == sorted(reports)
    assert 0 < reports[0][0] < stored
    assert reports[-1] == (stored, stored)
