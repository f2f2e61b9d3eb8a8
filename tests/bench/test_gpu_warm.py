"""Parts compiled first on a GPU machine: run in the interpreter or by hand-made wrappers, and run
concurrently."""

import sys

import pytest
import torch

from bench import gpu_warm
from engine.core.numerics import HOST
from tests.support.kernels.flashinfer import FakeWrappers

PYTHON = [sys.executable, "-c"]


def test_every_kind_of_piece_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_warm, "_DEVICE", HOST)
    monkeypatch.setattr(gpu_warm, "FlashInferWrappers", lambda device: FakeWrappers())
    for piece in (gpu_warm.decode, gpu_warm.prefill, gpu_warm.tree):
        assert piece(64).isfinite().all()
    assert gpu_warm.recurrent(1, 2, torch.float32).isfinite().all()


def test_latent_lengths_are_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrapper:
        def plan(self, *values: object) -> None:
            starts, pages, _, length = values[:4]
            for lengths in (starts, pages, length):
                assert isinstance(lengths, torch.Tensor)
                assert (lengths.dtype, lengths.device) == (torch.int32, HOST)

        def run(self, *parts: torch.Tensor) -> torch.Tensor:
            assert [part.shape[-1] for part in parts] == [512, 64, 512, 64]
            return parts[0]

    class Wrappers:
        def __init__(self, device: torch.device) -> None: ...

        def latent(self) -> Wrapper:
            return Wrapper()

    monkeypatch.setattr(gpu_warm, "_DEVICE", HOST)
    monkeypatch.setattr(gpu_warm, "FlashInferLatentWrappers", Wrappers)
    assert gpu_warm.latent().shape == (5, 16, 512)


def test_each_part_is_reported_and_blocks_no_other() -> None:
    told = list[str]()
    failures = gpu_warm.run_all(
        {
            "good": [*PYTHON, "print('fine')"],
            "bad": [*PYTHON, "raise SystemExit('no nvcc')"],
            "slow": [*PYTHON, "import subprocess; subprocess.run(['sleep', '300'])"],
        },
        5.0,
        told.append,
    )
    assert failures == 2
    by_name = {line.partition(":")[0]: line for line in told}
    assert by_name["good"].startswith("good: ok")
    assert "exit status 1\nno nvcc" in by_name["bad"]
    assert "not done within 5 s" in by_name["slow"]
