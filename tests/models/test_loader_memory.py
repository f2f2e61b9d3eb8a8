"""A middle stage of a 2 GB checkpoint needs the memory of that stage, not of the checkpoint, and a
rank that of its share.

The files are sparse: right headers, right sizes, and zeros that take no disk.
"""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

NUM_LAYERS, NUM_SHARDS, HIDDEN, WIDTH = 16, 4, 2048, 8192
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "dtype": "bfloat16",
    "eos_token_id": 2,
}
MATRICES = {
    **{f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"},
    "mlp.gate_proj": (WIDTH, HIDDEN),
    "mlp.up_proj": (WIDTH, HIDDEN),
    "mlp.down_proj": (HIDDEN, WIDTH),
}
BITS = {
    "model": 16,
    "int8": 8,
    "int4": 5,
}  # of a weight; four bits and a scale and an offset for 32
LAYER_BYTES = 2 * sum(rows * columns for rows, columns in MATRICES.values())

MEASURE = """
import re, sys
from pathlib import Path
from engine.core.numerics import Numerics, WeightFormat
from engine.core.layer_range import LayerRange, TensorRank
from engine.pipeline.ranks import StageRanks
from engine.kernels.host.linear.packed_linear import PackedWeight
from engine.kernels.host.codegen.compiled import Team
from models.loader import read_model
import torch

def memory_kib(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

for weight_format in WeightFormat:
    PackedWeight(torch.ones(1, 1).bfloat16(), None, Team(), weight_format=weight_format)  # what kernels need themselves
own = TensorRank(0, int(sys.argv[2]))
model = read_model(Path(sys.argv[1]), weight_format=WeightFormat(sys.argv[3])).of_rank(own)
before = memory_kib("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # reset the peak
stage = model.load_stage(LayerRange(6, 10), numerics=Numerics.EXACT, ranks=StageRanks(own) if own.size > 1 else None)
print(memory_kib("VmHWM") - before)
"""


def write_sparse_checkpoint(folder: Path, *, is_quantized: bool) -> int:
    """Write matrices in bf16, or FP8 in blocks of 128; return the size in bytes."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (1000, HIDDEN),
        "lm_head": (1000, HIDDEN),
        "model.norm": (HIDDEN,),
    }
    for layer_id in range(NUM_LAYERS):
        shapes |= {f"model.layers.{layer_id}.{name}": shape for name, shape in MATRICES.items()}
        shapes |= {
            f"model.layers.{layer_id}.{name}_layernorm": (HIDDEN,)
            for name in ("input", "post_attention")
        }
    dtypes = dict.fromkeys(shapes, ("BF16", 2))
    if is_quantized:
        for name, (rows, columns) in (
            (name, shape) for name, shape in [*shapes.items()] if name.endswith("_proj")
        ):
            dtypes[name], dtypes[f"{name}.weight_scale_inv"] = ("F8_E4M3", 1), ("F32", 4)
            shapes[f"{name}.weight_scale_inv"] = (rows // 128, columns // 128)
    names = sorted(shapes)
    weight_map: dict[str, str] = {}
    total = 0
    for shard in range(NUM_SHARDS):
        header, offset = {}, 0
        for name in names[shard::NUM_SHARDS]:
            num_bytes = dtypes[name][1] * math.prod(shapes[name])
            header[name if name.endswith("_inv") else f"{name}.weight"] = {
                "dtype": dtypes[name][0],
                "shape": shapes[name],
                "data_offsets": [offset, offset + num_bytes],
            }
            offset += num_bytes
        encoded = json.dumps(header).encode()
        file = folder / f"model-{shard}.safetensors"
        with file.open("wb") as stream:
            stream.write(len(encoded).to_bytes(8, "little") + encoded)
            stream.truncate(8 + len(encoded) + offset)
        weight_map |= dict.fromkeys(header, file.name)
        total += offset
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    fp8 = (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
        if is_quantized
        else {}
    )
    (folder / "config.json").write_text(json.dumps({**CONFIG, **fp8}))
    return total


@pytest.mark.parametrize(
    ("is_quantized", "num_ranks", "kept"),
    [
        (False, 1, "model"),
        (False, 4, "model"),
        (False, 1, "int8"),
        (False, 1, "int4"),
        pytest.param(True, 1, "model", marks=pytest.mark.long),
    ],
)
def test_peak_memory_of_a_middle_stage(
    tmp_path: Path, num_ranks: int, kept: str, *, is_quantized: bool
) -> None:
    """Of all of it, of one of the ranks that share it, and as codes. In eight bits, scales take a
    hundredth more and the matrix that is being read, in the model's type, an eighth."""
    assert write_sparse_checkpoint(tmp_path, is_quantized=is_quantized) > (
        1e9 if is_quantized else 2e9
    )
    measured = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path), str(num_ranks), kept],
        capture_output=True,
        text=True,
        check=True,
        timeout=280,
    )
    share = 4 * LAYER_BYTES // num_ranks * BITS[kept] / 16
    assert share < int(measured.stdout) * 1024 < (1.2 if kept == "model" else 1.3) * share
