"""`--device`: what a machine or a device does not offer is refused in one line, before anything is
loaded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.assembly.cpu import CpuBackends
from engine.core.layer_range import LayerRange
from engine.core.numerics import Numerics
from engine.memory.layout import CacheKind
from pool.stage.backends import check_offered, choose_backends
from pool.stage.config import WorkerConfig
from pool.stage.warmup import run_every_kind
from runtime.config import load
from runtime.errors import ConfigError
from runtime.process.supervision import EXIT_CONFIG
from tests.support.device.device_stack import MAX_NODES, build_stage, device_backends
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.tiny_models import (
    GEMMA3,
    GLM_DSA,
    GPT_OSS,
    HYBRID,
    KIMI_LINEAR,
    LLAMA,
    QWEN3_MOE,
    tiny,
)

CUDA = torch.device("cuda")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_missing_device_is_reported_in_one_line(tmp_path: Path, role: str) -> None:
    """Through the real command."""
    model = make_checkpoint(tmp_path, "llama")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            role,
            "--model",
            os.fspath(model),
            "--device",
            "cuda",
            "--numerics",
            "fast",
            "--log-level",
            "error",
        ],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == EXIT_CONFIG
    assert done.stderr.splitlines() == [
        f"{role}: device cuda needs a CUDA device and a CUDA build of torch; torch {torch.__version__} finds none here"
    ]


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:1,2", "CUDA", "cpu:0", ""])
def test_a_name_that_is_no_device(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(WorkerConfig, section="decode", flags={"model": Path("x"), "device": name}, file=None)
    assert str(refused.value) == f"decode.device: device must be cpu, cuda or cuda:N, got {name!r}"


@pytest.mark.parametrize("name", ["cpu", "cuda", "cuda:0", "cuda:12"])
def test_names_of_devices(name: str) -> None:
    assert (
        load(
            WorkerConfig, section="decode", flags={"model": Path("x"), "device": name}, file=None
        ).device
        == name
    )


@pytest.mark.parametrize(
    ("config", "numerics", "field"),
    [
        (LLAMA, Numerics.EXACT, "numerics"),
        (GEMMA3, Numerics.FAST, "device"),
        (KIMI_LINEAR, Numerics.FAST, "device"),
        ({**GPT_OSS, "layer_types": ["full_attention"] * 5}, Numerics.FAST, "device"),
    ],
)
def test_features_a_device_lacks(config: dict[str, object], numerics: Numerics, field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_offered(CUDA, numerics, tiny(config))
    assert refused.value.field == field


@pytest.mark.parametrize("config", [LLAMA, HYBRID, QWEN3_MOE, GLM_DSA])
def test_features_a_device_offers(config: dict[str, object]) -> None:
    check_offered(CUDA, Numerics.FAST, tiny(config, "bfloat16"))


def test_the_host_offers_everything() -> None:
    for numerics in Numerics:
        assert choose_backends("cpu", numerics, tiny(GLM_DSA)) == CpuBackends(numerics)


def test_kernels_are_tried_on_null_records_only() -> None:
    """Every kind of batch before a stage serves leaves what belongs to requests as it was."""
    description = tiny(HYBRID)
    for layers in (LayerRange(0, 2), LayerRange(2, 4), LayerRange(4, 5)):
        stage, pools = build_stage(description, device_backends(), layers)
        run_every_kind(stage, description.facts, capture_layers=frozenset({1}), max_nodes=MAX_NODES)
        assert stage.num_plans == 4
        caches = [cache for kind in CacheKind for cache in pools.of_kind(kind).values()]
        assert caches
        for cache in caches:
            assert cache[0].isfinite().all()
            assert cache[1:].isnan().all()
