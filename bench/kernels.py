"""`python -m bench.kernels`: products of a model's layers in bf16, ours against oneDNN's.

One pass runs the products of `--layers` layers of Qwen3-0.6B's shape (q, k, v; o; silu(gate) * up;
down). All weights differ, so that few rows are bound by memory as in a model. Sides are processes
that take turns on the same cores for every pass: ours; oneDNN with packed weights, as installed;
and the same restricted to AVX512-BF16, if the CPU has AMX. A ratio is the median over rounds of
oneDNN's time / ours. `packing_gbps` is bytes of weights packed per second. `foreign_cores` is the
number of cores that other processes used; above 0.2 the figures are noise.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from bench.report import OtherLoad, Value, render
from bench.sides import LineProcess
from engine.kernels.host.codegen.compiled import Team
from engine.kernels.host.linear.packed_linear import PackedWeight, arithmetic_class

HIDDEN = 1024
HEADS_WIDTH = 2048
QKV_WIDTH = 4096
MLP_WIDTH = 3072
ROWS = (1, 2, 4, 8, 16, 32, 192, 512)
SIDES = {"ours": {}, "onednn": {}, "onednn_avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}}
Pass = Callable[[Tensor, Tensor], None]


class KernelSide(LineProcess):
    """One side of the comparison."""

    def __init__(self, name: str, *, threads: int, layers: int) -> None:
        command = [
            sys.executable,
            "-m",
            "bench.kernels",
            f"--side={name}",
            f"--threads={threads}",
            f"--layers={layers}",
        ]
        super().__init__(name, command, {**os.environ, "THP_MEM_ALLOC_ENABLE": "1", **SIDES[name]})

    def seconds(self, rows: int) -> float:
        """Return the seconds of one pass; for 0 rows, of packing all weights at startup."""
        return float(json.loads(self.exchange(str(rows))))


def serve(name: str, *, threads: int, layers: int) -> None:
    """Run a side: read row counts, write seconds."""
    torch.set_num_threads(threads)
    build = our_pass if name == "ours" else onednn_pass
    weights = [
        [
            torch.empty(*shape, dtype=torch.bfloat16).normal_(0, 0.03)
            for shape in (
                (QKV_WIDTH, HIDDEN),
                (HIDDEN, HEADS_WIDTH),
                (MLP_WIDTH, HIDDEN),
                (MLP_WIDTH, HIDDEN),
                (HIDDEN, MLP_WIDTH),
            )
        ]
        for _ in range(layers)
    ]
    build(weights[:1])  # compile first
    started = time.perf_counter()
    run = build(weights)
    packing_s = time.perf_counter() - started
    weights.clear()
    for line in sys.stdin:
        rows = int(line)
        seconds = packing_s
        if rows:
            x = torch.randn(rows, HIDDEN).bfloat16()
            heads = torch.randn(rows, HEADS_WIDTH).bfloat16()
            started = time.perf_counter()
            run(x, heads)
            seconds = time.perf_counter() - started
        print(json.dumps(seconds), flush=True)


def our_pass(weights: list[list[Tensor]]) -> Pass:
    team = Team()
    layers = [[PackedWeight(weight, None, team) for weight in layer] for layer in weights]

    def run(x: Tensor, heads: Tensor) -> None:
        for qkv, o, gate, up, down in layers:
            qkv.multiply(x)
            o.multiply(heads)
            down.multiply(gate.multiply_gated(x, up))

    return run


def onednn_pass(weights: list[list[Tensor]]) -> Pass:
    ops = torch.ops.mkldnn
    layers = [[ops._reorder_linear_weight(weight, None) for weight in layer] for layer in weights]  # noqa: SLF001

    def run(x: Tensor, heads: Tensor) -> None:
        for qkv, o, gate, up, down in layers:
            ops._linear_pointwise(x, qkv, None, "none", [], "")  # noqa: SLF001
            ops._linear_pointwise(heads, o, None, "none", [], "")  # noqa: SLF001
            gated = ops._linear_pointwise(x, gate, None, "swish", [], "")  # noqa: SLF001
            both = ops._linear_pointwise.binary(x, gated, up, None, "mul")  # noqa: SLF001
            ops._linear_pointwise(both, down, None, "none", [], "")  # noqa: SLF001

    return run


def measure(sides: dict[str, KernelSide], *, rounds: int, layers: int) -> dict[str, Value]:
    weight_bytes = layers * 2 * HIDDEN * (QKV_WIDTH + HEADS_WIDTH + 3 * MLP_WIDTH)
    values: dict[str, Value] = {
        "packing_gbps": round(weight_bytes / sides["ours"].seconds(0) / 1e9, 2)
    }
    others = OtherLoad()
    for rows in ROWS:
        for side in sides.values():
            side.seconds(rows)  # warm-up
        taken: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(rounds):
            for name, side in sides.items():
                taken[name].append(side.seconds(rows))
        for name, seconds in taken.items():
            values[f"rows_{rows}_{name}_ms"] = round(median(seconds) * 1e3, 2)
        for name in [name for name in sides if name != "ours"]:
            ratios = [
                theirs / ours for theirs, ours in zip(taken[name], taken["ours"], strict=True)
            ]
            values[f"rows_{rows}_{name}_ratio"] = round(median(ratios), 3)
        values[f"rows_{rows}_ours_gflops"] = round(
            rows * weight_bytes / median(taken["ours"]) / 1e9, 1
        )
    return {**values, **others.figures()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("threads", 2), ("rounds", 7), ("layers", 28)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--side", choices=list(SIDES), help="run as this side (internal)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    flags = parser.parse_args()
    if flags.side:
        serve(flags.side, threads=flags.threads, layers=flags.layers)
        return 0
    names = list(SIDES) if torch.ops.mkldnn._is_mkldnn_bf16_supported() else ["ours"]  # noqa: SLF001
    sides = {name: KernelSide(name, threads=flags.threads, layers=flags.layers) for name in names}
    try:
        values = measure(sides, rounds=flags.rounds, layers=flags.layers)
    finally:
        for side in sides.values():
            side.__exit__()
    print(
        render(
            "kernels",
            {
                "threads": flags.threads,
                "layers": flags.layers,
                "arithmetic": arithmetic_class(),
                **values,
            },
            as_json=flags.json,
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
