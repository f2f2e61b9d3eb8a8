"""Checkpoints in published shapes, with random weights or with headers only.

Names and shapes of the tensors are transformers' own (built without memory).
"""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

QWEN3_0_6B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}
LLAMA_3_1_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
QWEN3_5_9B: dict[str, Any] = {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 262144,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 248044,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}
_BLOCK = 1 << 22  # random numbers, generated once and written repeatedly


def write_published(
    folder: Path, config_class: str, fields: dict[str, Any], *, has_weights: bool = False
) -> Path:
    """Write a checkpoint in bf16. Without weights its file is sparse, of full size and all
    zeros."""
    config = getattr(transformers, config_class)(**fields, dtype="bfloat16")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    folder.mkdir(parents=True)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    tied = {"lm_head.weight"} if fields["tie_word_embeddings"] else set()
    shapes = {
        name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied
    }
    with (folder / "model.safetensors").open("wb") as file:
        header, size = _header(shapes)
        file.write(struct.pack("<Q", len(header)) + header)
        start = file.tell()
        if has_weights:
            block = _random_block()
            for name, shape in shapes.items():
                _write(file, block, int(np.prod(shape)), is_norm="norm" in name)
        file.truncate(start + size)
    return folder


def _header(shapes: dict[str, tuple[int, ...]]) -> tuple[bytes, int]:
    entries, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + 2 * int(np.prod(shape))
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    return json.dumps(entries).encode(), offset


def _random_block() -> bytes:
    numbers = torch.randn(_BLOCK, generator=torch.Generator().manual_seed(0)) * 0.03
    return numbers.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()


def _write(file: Any, block: bytes, count: int, *, is_norm: bool) -> None:  # noqa: ANN401 - a binary file
    if is_norm:
        file.write(b"\x80\x3f" * count)  # 1 in bf16
        return
    for _ in range(2 * count // len(block)):
        file.write(block)
    file.write(block[: 2 * count % len(block)])
