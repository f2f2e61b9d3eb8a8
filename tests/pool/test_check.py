"""`baton check` predicts a worker's output and the memory of stages without reading a weight."""

import json
import os
import shutil
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pool.check import report
from pool.stage import pool_size
from pool.stage.config import WorkerConfig
from runtime.errors import ConfigError
from runtime.process.host_memory import HostMemory
from tests.support.models.checkpoints import add_nextn, make_checkpoint
from tests.support.models.quantized import write_quantized

MIB = 1 << 20


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """Write a checkpoint of 4 layers with 2 kv heads of 20 in fp32: 320 bytes per token and
    layer."""
    return make_checkpoint(tmp_path, "llama")


def said_of(model: Path, **fields: object) -> list[str]:
    return list(report(WorkerConfig.model_validate({"model": model, **fields})))


def lines_of(model: Path, **fields: object) -> list[list[str]]:
    """Return the lines before those about outputs."""
    said = said_of(model, **fields)
    return [
        line.split() for line in takewhile(lambda line: not line.startswith("end tokens"), said)
    ]


def test_stages_and_their_memory(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_arguments: object) -> int:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(os, "preadv", never)
    monkeypatch.setattr(
        pool_size, "host_memory", lambda: HostMemory(1024, 1024)
    )  # given a size, it is for any machine
    head, _, *stages, size = lines_of(llama, world_size=2, partition="1,3", memory_mb=1)
    assert (
        " ".join(head)
        == "llama-float32-0: LlamaForCausalLM, 4 layers, runs in float32, stored as F32"
    )
    tensors = load_file(llama / "model.safetensors")
    beside = (("model.embed_tokens.weight",), ("model.norm.weight", "lm_head.weight"))
    for stage, layers, others in zip(stages, ((0,), (1, 2, 3)), beside, strict=True):
        own = sum(
            tensor.nbytes
            for name, tensor in tensors.items()
            if name in others or any(f".layers.{layer}." in name for layer in layers)
        )
        assert stage[1] == f"{layers[0]}-{layers[-1] + 1}"
        assert stage[2:6] == [f"{own / 1024:.1f}", "KiB", f"{len(layers) * 320 / 1024:.1f}", "KiB"]
    assert size[:4] == [str(MIB // (3 * 64 * 320) - 1), "pages", "of", "64"], (
        "what the larger stage holds"
    )


def test_ranks_of_a_stage_and_data_ranks(llama: Path) -> None:
    """Each has half the weights and heads; as a data rank of its own, all heads of half the
    requests."""

    def sizes(line: list[str]) -> tuple[float, float]:
        return float(line[2]), float(line[4])

    alone = lines_of(llama, num_pages=9)
    shared = lines_of(llama, world_size=2, tp=2, num_pages=9)
    apart = lines_of(llama, world_size=2, tp=2, dp_attention=2, num_pages=9)
    weights, cache = sizes(alone[2])
    tensors = load_file(llama / "model.safetensors")
    attention = (
        sum(tensor.nbytes for name, tensor in tensors.items() if ".self_attn." in name) / 1024
    )
    assert sizes(shared[2]) == pytest.approx((weights / 2, cache / 2), abs=0.1)
    assert sizes(apart[2]) == pytest.approx((weights / 2 + attention / 2, cache), abs=0.1)
    assert " ".join(shared[3]) == " ".join(apart[3]) == "of each of the 2 ranks of a stage"
    assert [lines[-1][0] for lines in (alone, shared, apart)] == ["8", "8", "16"]


def test_a_quantized_model_and_its_draft(tmp_path: Path) -> None:
    plain = add_nextn(make_checkpoint(tmp_path, "deepseek_v32"), tmp_path / "plain")
    model = write_quantized(plain, tmp_path / "model", "fp8 blocks")
    head, _, first, last, _ = lines_of(model, world_size=2, draft=model, memory_mb=64)
    assert " ".join(head).endswith("runs in float32, stored as F32, F8_E4M3")
    alone = lines_of(model, world_size=2, memory_mb=64, spec_prompt=False)[3]
    assert (first[1], last[1], alone[1]) == ("0-2", "2-4", "2-4")
    assert (last[3], alone[3]) == ("MiB", "KiB"), "with the draft's weights"


@pytest.mark.parametrize(("weights", "group_bytes"), [("int8", 0), ("int4", 20)])
def test_coded_weights(tmp_path: Path, weights: str, group_bytes: int) -> None:
    """Of a matrix in eight bits a byte for each weight and 32 for each row, in four bits 20 for
    each 32 that an eighth touches; of the embedding, which is also the head, its own form and eight bits."""
    model = make_checkpoint(tmp_path, "llama_tied_bias")
    shown = [line[2] for line in lines_of(model, memory_mb=64, weights=weights)[2:-1]]
    kept = 0
    for name, tensor in load_file(model / "model.safetensors").items():
        is_head = name == "model.embed_tokens.weight"
        coded = tensor.numel() + 32 * len(tensor)
        if group_bytes and not is_head and tensor.dim() > 1:
            own = -(-tensor.shape[1] // 16) * 2  # terms of an eighth
            starts = range(0, 8 * own, own)
            groups = max(len({term // 32 for term in range(at, at + own)}) for at in starts)
            coded = len(tensor) * 8 * groups * group_bytes
        kept += tensor.nbytes if tensor.dim() == 1 else coded
        kept += tensor.nbytes if is_head else 0
    assert shown == [f"{kept / 1024:.1f}"]
    with pytest.raises(ConfigError, match=f"weights {weights} are for device cpu, not cuda"):
        lines_of(model, memory_mb=64, weights=weights, device="cuda")
    with pytest.raises(
        ConfigError, match=f"weights {weights}: there are no such products for models in float16"
    ):
        lines_of(
            make_checkpoint(tmp_path, "llama", dtype=torch.float16), memory_mb=64, weights=weights
        )


def test_end_tokens_and_sampling_defaults_are_shown(llama: Path) -> None:
    """And what an operator has to know of the files."""
    assert said_of(llama, memory_mb=64)[-2:] == [
        "end tokens: 2 (generation_config.json)",
        "the model's own sampling: none",
    ]
    (llama / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [], "temperature": 0.6, "top_k": 20, "typical_p": 0.9})
    )
    config = json.loads((llama / "config.json").read_text())
    del config["dtype"]
    (llama / "config.json").write_text(json.dumps({**config, "eos_token_id": [2, 3]}))
    assert said_of(llama, memory_mb=64)[-4:] == [
        "end tokens: 2 3 (config.json)",
        "the model's own sampling: temperature 0.6, top_k 20",
        "generation_config.json states typical_p, which Baton does not apply",
        f"{llama / 'config.json'} states no dtype: the model runs in the dtype of its weights, float32",
    ]
    (llama / "generation_config.json").write_text(json.dumps({"top_p": 1.5}))
    with pytest.raises(
        ConfigError, match=r"generation_config\.json: top_p must be above 0 and at most 1, is 1\.5"
    ):
        said_of(llama, memory_mb=64)


def test_refusals_equal_those_of_a_worker(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--memory-mb \d+ would do"):
        lines_of(
            make_checkpoint(tmp_path, "qwen3_5"), memory_mb=1, max_context=512, max_running=4096
        )
    with pytest.raises(ConfigError, match="--tp 8 leaves a rank without any of the 4 heads"):
        lines_of(llama, world_size=8, tp=8, memory_mb=64)
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM has no experts"):
        lines_of(llama, world_size=2, tp=2, ep=2, memory_mb=64)
    broken = Path(shutil.copytree(llama, tmp_path / "broken"))
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(ConfigError, match=r"missing: layers\.3\.mlp\.up_proj\.weight"):
        lines_of(broken, world_size=2, memory_mb=64)


def test_the_command(llama: Path) -> None:
    def baton(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "baton", "check", str(llama), *arguments],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    done = baton("--pp", "2", "--tp", "2", "--dp-attention", "2", "--memory-mb", "8")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0].startswith("llama-float32-0: LlamaForCausalLM")
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "bitsandbytes"}})
    )
    done = baton()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        "baton: config.json: quantization_config: quant_method 'bitsandbytes' is not supported"
    )
