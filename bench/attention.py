"""Attention alone, at the shape of Qwen3-0.6B: decode and prefill.

    OMP_NUM_THREADS=2 python -m bench.attention [--against CHECKOUT] [--json]

The shape is 16 query heads, 8 kv heads of 128, bf16, pages of 64. The references, in turn, are
torch's own attention over dense keys and another checkout.

`bandwidth`: bytes of keys and values per second, and the rate of a sum over 512 MB in the same
minute.
"""

import statistics
import time
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.nn.functional as F

from bench.report import Value
from bench.sides import checkout_sides, compare_checkouts

CASES = (
    ("decode", 1, 512),
    ("decode", 8, 512),
    ("decode", 32, 512),
    ("prefill", 1, 512),
    ("prefill", 1, 2048),
)
NUM_ROUNDS = 9
KEY_BYTES = 2 * 8 * 128 * 2  # of one token in one layer
_DENSE_COPIES = 8


class Dense:
    """torch's attention over keys that are already dense."""

    def __init__(self) -> None:
        self._cached = torch.randn(_DENSE_COPIES, 2, 32, 8, 512, 128).bfloat16()
        self._turn = 0

    def time(self, kind: str, rows: int, length: int) -> float:
        """Return the seconds per layer."""
        queries = torch.randn(rows, 16, 1 if kind == "decode" else length, 128).bfloat16()
        prompt = torch.randn(2, 1, 8, length, 128).bfloat16()
        started = time.perf_counter()
        for copy in range(_DENSE_COPIES):
            first = (self._turn + rows * copy) % 32 if rows < 32 else 0
            keys, values = (
                self._cached[copy, :, first : first + rows] if kind == "decode" else prompt
            )
            F.scaled_dot_product_attention(
                queries[: len(keys)], keys, values, is_causal=kind != "decode", enable_gqa=True
            )
        self._turn += rows
        return (time.perf_counter() - started) / _DENSE_COPIES


def read_bandwidth(memory: torch.Tensor) -> float:
    """Return the bytes per second of one sum over the memory."""
    started = time.perf_counter()
    memory.sum()
    return memory.nbytes / (time.perf_counter() - started)


def measure(against: Path | None) -> dict[str, Value]:
    values: dict[str, Value] = {"num_threads": torch.get_num_threads()}
    dense = Dense()
    memory = torch.ones(128 << 20)
    with ExitStack() as stack:
        sides = checkout_sides("attention_side.py", against, stack)
        for case in CASES:
            name = f"{case[0]}_{case[1] if case[0] == 'decode' else case[2]}"
            taken: dict[str, list[float]] = {side: [] for side in (*sides, "torch")}
            read = []
            for _ in range(NUM_ROUNDS):
                for side, process in sides.items():
                    taken[side].append(process.time(*case))
                taken["torch"].append(dense.time(*case))
                read.append(read_bandwidth(memory))
            medians = {side: statistics.median(times[1:]) for side, times in taken.items()}
            values |= {f"{name}_{side}_ms": seconds * 1e3 for side, seconds in medians.items()}
            values |= {
                f"{name}_speedup_over_{side}": medians[side] / medians["ours"]
                for side in medians
                if side != "ours"
            }
            if case[0] == "decode":
                gained = case[1] * case[2] * KEY_BYTES / medians["ours"]
                values |= {
                    f"{name}_bandwidth_gbs": gained / 1e9,
                    f"{name}_bandwidth_share": gained / statistics.median(read),
                }
    return values


if __name__ == "__main__":
    compare_checkouts("attention", __doc__, measure)
