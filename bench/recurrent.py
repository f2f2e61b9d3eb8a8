"""Convolution and delta rule, and latent attention, against another checkout in turn.

    OMP_NUM_THREADS=2 python -m bench.recurrent [--against CHECKOUT] [--json]

The shapes are Qwen3.5-0.8B's (16 heads of 128, bf16) and DeepSeek-V3's (128 heads of 512 + 64; with
a choice: 2,048 keys by 64 index heads of 128).
"""

import statistics
from contextlib import ExitStack
from pathlib import Path

import torch

from bench.report import Value
from bench.sides import checkout_sides, compare_checkouts

CASES = (
    ("delta", "prefill", 1, 512),
    ("delta", "decode", 1, 512),
    ("delta", "decode", 8, 512),
    ("latent", "prefill", 1, 256),
    ("latent", "decode", 1, 1024),
    ("latent", "decode", 8, 1024),
    ("chosen", "decode", 1, 4096),
    ("chosen", "decode", 8, 4096),
)
NUM_ROUNDS = 7


def measure(against: Path | None) -> dict[str, Value]:
    values: dict[str, Value] = {"num_threads": torch.get_num_threads()}
    with ExitStack() as stack:
        sides = checkout_sides("recurrent_side.py", against, stack)
        for case in CASES:
            part, kind, rows, length = case
            name = f"{part}_{kind}_{rows if kind == 'decode' else length}"
            taken: dict[str, list[float]] = {side: [] for side in sides}
            for _ in range(NUM_ROUNDS):
                for side, process in sides.items():
                    taken[side].append(process.time(*case))
            medians = {side: statistics.median(times[1:]) for side, times in taken.items()}
            values |= {f"{name}_{side}_ms": seconds * 1e3 for side, seconds in medians.items()}
            if against is not None:
                values[f"{name}_speedup"] = medians["against"] / medians["ours"]
    return values


if __name__ == "__main__":
    compare_checkouts("recurrent", __doc__, measure)
