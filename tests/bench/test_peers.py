"""The comparison with other engines: how it starts them, and what it makes of their times. No peer
is needed here."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from bench import engine_sides, peer_files
from bench.peers import LlamaSide, PeerCase, measure
from models.blocks.random_weights import RandomWeights

LLAMA_BENCH = """#!/bin/sh
echo "$@" >>"$0.calls"
echo '[{"avg_ns": 1600000000}]'
"""


class FakeSide:
    def __init__(self, seconds: Mapping[str, float | None]) -> None:
        self._seconds = seconds

    def prefill(self, tokens: int) -> float:
        seconds = self._seconds[f"prefill_{tokens}"]
        assert seconds is not None
        return seconds

    def decode(self, rows: int, steps: int) -> float | None:
        return self._seconds[f"decode_b{rows}"]


def test_ratios_divide_by_our_time_and_skip_cases_a_peer_lacks() -> None:
    ours = FakeSide(
        {
            "prefill_512": 1.0,
            "prefill_2048": 4.0,
            "decode_b1": 0.1,
            "decode_b8": 0.2,
            "decode_b32": 0.4,
        }
    )
    llama = FakeSide(
        {
            "prefill_512": 2.0,
            "prefill_2048": 6.0,
            "decode_b1": 0.15,
            "decode_b8": None,
            "decode_b32": None,
        }
    )
    values = measure({"baton": ours, "llama": llama}, turns=3, steps=4)
    assert values["prefill_512_vs_llama"] == 2.0
    assert values["prefill_2048_vs_llama"] == 1.5
    assert values["decode_b1_vs_llama"] == 1.5
    assert values["decode_b8_baton_tokens_per_s"] == 40.0
    assert "decode_b8_vs_llama" not in values


def test_a_ratio_is_taken_turn_by_turn() -> None:
    case = PeerCase("decode_b1", 1)
    for ours, theirs in ((1.0, 2.0), (10.0, 30.0), (1.0, 2.5)):  # the machine was slow for a while
        case.add("baton", ours)
        case.add("vllm", theirs)
    assert case.report()["decode_b1_vs_vllm"] == 2.5


def test_llama_bench_runs_one_row_after_the_context(tmp_path: Path) -> None:
    program = tmp_path / "llama-bench"
    program.write_text(LLAMA_BENCH)
    program.chmod(0o755)
    side = LlamaSide(program, tmp_path / "model.gguf", 2)
    assert side.prefill(512) == 1.6
    assert side.decode(1, 16) == pytest.approx(0.1)
    assert side.decode(8, 16) is None
    assert (tmp_path / "llama-bench.calls").read_text().splitlines() == [
        f"-m {tmp_path}/model.gguf -t 2 -o json -r 1 -p 512 -n 0",
        f"-m {tmp_path}/model.gguf -t 2 -o json -r 1 -p 0 -n 16 -d 512",
    ]


def test_vllms_side_runs_without_our_packages() -> None:
    """Its Python has none of Baton's packages, and `bench/kernels.py` must not shadow its package
    `kernels`."""
    program = Path(peer_files.__file__).with_name("peer_vllm.py")
    done = subprocess.run(
        [sys.executable, "-P", program, "turns", "nowhere", "1", "512"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd="/",
        env={"PATH": os.environ["PATH"]},
    )
    assert "No module named 'vllm'" in done.stderr


def test_the_checkpoint_is_the_model_that_our_side_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "vocab_size": 64,
        "head_dim": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    for name, value in small.items():
        monkeypatch.setitem(engine_sides.MODEL, name, value)
    folder = peer_files.write_checkpoint(tmp_path / "checkpoint")
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 32
    expected = torch.empty(16, 32, dtype=torch.bfloat16)
    RandomWeights(seed=0).read("layers.0.self_attn.k_proj.weight", expected)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert len(file.keys()) == 2 + 11
        assert torch.equal(file.get_tensor("model.layers.0.self_attn.k_proj.weight"), expected)
