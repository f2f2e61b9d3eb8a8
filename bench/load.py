"""`python -m bench.load`: cost of loading besides reading and packing, and of the digest of every
byte.

A checkpoint of Qwen3-0.6B's shape (1.19 GB of random bf16) is loaded whole, as a pool of one stage
does: read from the page cache and packed for the kernels. Loads with and without the digest take
turns, also for the first place. `cost` is the median over rounds of the time that the digest adds,
as a share of the load without it. `cpu_cost` is the same in CPU time of all threads, which other
processes disturb less. `over_parts` is a load with the digest as a multiple of its parts alone in
the same round: reading each tensor into new memory, packing each matrix. `foreign_cores` is the
number of cores that other processes used; above 0.2 the seconds are noise.
"""

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.report import OtherLoad, Value, render

HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}  # torch reads it at import


@dataclass(frozen=True)
class Seconds:
    """Duration of one load: wall clock, and CPU time of all threads."""

    wall: float
    cpu: float


def measure(folder: Path, rounds: int) -> dict[str, Value]:
    """Alternate loads of the checkpoint in `folder`."""
    for digested in (False, True):
        load(folder, digested=digested)
    others = OtherLoad()
    plain: list[Seconds] = []
    with_digest: list[Seconds] = []
    parts: list[tuple[float, float]] = []
    for number in range(rounds):
        parts.append(read_and_pack(folder))
        for digested in (False, True) if number % 2 else (True, False):
            (with_digest if digested else plain).append(load(folder, digested=digested))
    pairs = list(zip(with_digest, plain, strict=True))
    costs = [ours.wall / theirs.wall - 1 for ours, theirs in pairs]
    return {
        "bytes": (folder / "model.safetensors").stat().st_size,
        "rounds": rounds,
        "load_s": round(median(seconds.wall for seconds in plain), 3),
        "read_s": round(median(read_s for read_s, _ in parts), 3),
        "pack_s": round(median(pack_s for _, pack_s in parts), 3),
        "over_parts": round(
            median(ours.wall / sum(each) for ours, each in zip(with_digest, parts, strict=True)), 3
        ),
        "load_cpu_s": round(median(seconds.cpu for seconds in plain), 3),
        "cost": round(median(costs), 4),
        "least_cost": round(min(costs), 4),
        "greatest_cost": round(max(costs), 4),
        "cpu_cost": round(median(ours.cpu / theirs.cpu - 1 for ours, theirs in pairs), 4),
        **others.figures(),
    }


def load(folder: Path, *, digested: bool) -> Seconds:
    """Run one load, from the files' headers to the last packed matrix."""
    from engine.core.layer_range import LayerRange
    from engine.core.numerics import Numerics
    from models.loader import read_model
    from models.weights_digest import WeightsDigest

    gc.collect()  # memory of the previous load
    started = time.perf_counter()
    cpu_s = time.process_time()
    model = read_model(folder)
    stage = model.load_stage(
        LayerRange(0, model.facts.num_layers),
        numerics=Numerics.EXACT,
        digest=WeightsDigest() if digested else None,
    )
    seconds = Seconds(time.perf_counter() - started, time.process_time() - cpu_s)
    del stage
    return seconds


def read_and_pack(folder: Path) -> tuple[float, float]:
    """Return the seconds to read every tensor, and to pack those used in products."""
    import torch

    from engine.kernels.host.codegen.compiled import Team
    from engine.kernels.host.linear.packed_linear import PackedWeight
    from models.checkpoint import open_tensors, read_tensor

    read_s = pack_s = 0.0
    for name, entry in open_tensors(folder).items():
        began_s = time.perf_counter()
        tensor = torch.empty(entry.shape, dtype=torch.bfloat16)
        read_tensor(entry, tensor, name=name, digest=None)
        done_s = time.perf_counter()
        read_s += done_s - began_s
        if tensor.dim() == 2:
            PackedWeight(tensor, None, Team())
            pack_s += time.perf_counter() - done_s
    return read_s, pack_s


def write_checkpoint(folder: Path) -> None:
    """Write random weights of the shape in `bench.engine`, with transformers' names."""
    import torch
    from safetensors.torch import save_file

    from bench.engine_sides import MODEL

    (hidden, heads, kv_heads, dim, inner, vocab) = (
        int(str(MODEL[name]))
        for name in (
            "hidden_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "intermediate_size",
            "vocab_size",
        )
    )
    layer = {
        "self_attn.q_proj": (heads * dim, hidden),
        "self_attn.k_proj": (kv_heads * dim, hidden),
        "self_attn.v_proj": (kv_heads * dim, hidden),
        "self_attn.o_proj": (hidden, heads * dim),
        "self_attn.q_norm": (dim,),
        "self_attn.k_norm": (dim,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for number in range(int(str(MODEL["num_hidden_layers"]))):
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    random = torch.Generator().manual_seed(0)
    save_file(
        {
            name: torch.randn(shape, generator=random).mul(0.02).bfloat16()
            for name, shape in shapes.items()
        },
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(MODEL))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9, help="number of rounds; default 9")
    parser.add_argument(
        "--threads", type=int, default=2, help="threads of the kernels that pack weights; default 2"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    flags = parser.parse_args()
    os.environ.update(HUGE_PAGES)
    import torch

    torch.set_num_threads(flags.threads)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder))
        print(render("load", measure(Path(folder), flags.rounds), as_json=flags.json), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
