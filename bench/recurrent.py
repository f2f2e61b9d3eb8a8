"""Convolution and delta rule of Qwen3.5-0.8B's shape (16 heads of 128, bf16), and latent attention of DeepSeek-V3 (128
heads of 512 + 64; with a choice: 2,048 keys by 64 index heads of 128), beside another checkout in turn.

    OMP_NUM_THREADS=2 python -m bench.recurrent [--against CHECKOUT] [--json]
"""

import argparse
import os
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import torch

from bench.report import Value, render

CASES = (("delta", "prefill", 1, 512), ("delta", "decode", 1, 512), ("delta", "decode", 8, 512),
         ("latent", "prefill", 1, 256), ("latent", "decode", 1, 1024), ("latent", "decode", 8, 1024),
         ("chosen", "decode", 1, 4096), ("chosen", "decode", 8, 4096))
NUM_ROUNDS = 7


class Side:
    """A process that times one checkout."""

    def __init__(self, checkout: Path, stack: ExitStack) -> None:
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        self._process = stack.enter_context(subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("recurrent_side.py"))], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        stack.callback(self._process.terminate)

    def time(self, *case: str | int) -> float:
        """Seconds per layer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(*case, file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())


def measure(against: Path | None) -> dict[str, Value]:
    values: dict[str, Value] = {"num_threads": torch.get_num_threads()}
    with ExitStack() as stack:
        sides = {"ours": Side(Path(__file__).parents[1], stack)}
        if against is not None:
            sides["against"] = Side(against, stack)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout, timed in turn with this one")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    print(render("recurrent", measure(options.against), as_json=options.json))


if __name__ == "__main__":
    main()
