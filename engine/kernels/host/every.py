"""`python -m engine.kernels.host.every`: compile every kernel for this CPU, for all types, on all cores.

A process compiles a kernel before its first call, one after the other, and it is kept for every process after it. Where
much starts for the first time at once, on a fresh checkout or a new node, this takes a third of the time, and nothing
that has a deadline waits for it.
"""

import argparse
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch

from engine.kernels.host import (
    causal_conv,
    delta_rule,
    eight_bits,
    in_place,
    index_scores,
    latent,
    packing,
    product_kernel,
    tiles,
    token_passes,
)
from engine.kernels.host.amx import has_tiles
from engine.kernels.host.compiled import STORED_AS

Compile = tuple[Callable[..., object], tuple[object, ...], dict[str, object]]


def kernels() -> Iterator[Compile]:
    """What to call, and with what; those that take longest come first."""
    for dtype in STORED_AS:
        yield in_place.compiled_for, (dtype,), {"tiled": dtype is torch.bfloat16 and has_tiles()}
    for dtype, in_bytes in itertools.product(STORED_AS, (False, True)):
        yield product_kernel.compiled_for, (dtype,), {"in_bytes": in_bytes}
    for dtype, of_one_type in itertools.product(STORED_AS, (
            delta_rule.chunks_for, delta_rule.steps_for, index_scores.scores_for, causal_conv.compiled_for,
            eight_bits.compiled_for, token_passes.rotation_for)):
        yield of_one_type, (dtype,), {}
    for dtype, other in itertools.product(STORED_AS, STORED_AS):
        yield latent.compiled_for, (dtype, other), {}
        for rounds_first in (False, True):
            yield token_passes.norm_for, (dtype, other, rounds_first), {}
    for alone in (packing.compiled, tiles.compiled, index_scores.choice):
        yield alone, (), {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="", metavar="K/N", help="in this process, every Nth kernel from the Kth on")
    part = parser.parse_args().part
    if part:
        first, step = map(int, part.split("/"))
        for function, arguments, options in itertools.islice(kernels(), first, None, step):
            function(*arguments, **options)
        return 0
    begin_s, cores = time.monotonic(), len(os.sched_getaffinity(0))
    processes = [subprocess.Popen([sys.executable, "-m", "engine.kernels.host.every", "--part", f"{core}/{cores}"])
                 for core in range(cores)]
    codes = [process.wait() for process in processes]
    print(f"all kernels in {time.monotonic() - begin_s:.1f} s on {cores} cores")
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
