"""LoRA adapters of tiny checkpoints, written by PEFT with random factors."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from engine.core.numerics import WeightFormat
from models.adapters import read_adapters
from models.loader import ModelDescription, read_model
from tests.support.models.checkpoints import oracle

ALL_LINEAR = "all-linear"


def write_adapter(
    folder: Path,
    model: Path,
    *,
    seed: int,
    rank: int = 8,
    targets: str | Sequence[str] = ALL_LINEAR,
    **options: object,
) -> Path:
    """Write an adapter of the checkpoint `model` to `folder`; `options` are those of LoraConfig."""
    settings: dict[str, Any] = {"lora_alpha": 2 * rank, **options}
    names = targets if isinstance(targets, str) else list(targets)
    config = LoraConfig(task_type="CAUSAL_LM", r=rank, target_modules=names, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(oracle(model), config)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                spread = 0.5 / parameter.shape[-1] ** 0.5
                drawn = torch.randn(parameter.shape, generator=generator) * spread
                parameter.data.copy_(drawn)
        adapted.save_pretrained(str(folder))
    return folder


def adapted_oracle(model: Path, adapter: Path) -> PeftModel:
    """Open the checkpoint with the adapter as PEFT computes it, in fp32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = PeftModel.from_pretrained(oracle(model, dtype=torch.float32), str(adapter))
    found.train(mode=False)
    return found


def with_adapters(
    model: Path, folder: Path, *, weight_format: WeightFormat = WeightFormat.MODEL
) -> ModelDescription:
    """Describe the checkpoint with the adapters in `folder`."""
    return replace(read_model(model, weight_format=weight_format), adapters=read_adapters(folder))
