"""Host kernels and memory: a bit of a result comes from the arguments, never from what memory held
or was freed."""

import hashlib
import os
import subprocess
import sys

import torch

from engine.kernels.host.attention.paged_attention import attend_in_place
from engine.kernels.host.codegen.compiled import Team
from engine.kernels.host.linear.packed_linear import PackedGroup, PackedWeight
from tests.engine.kernels.test_paged_attention import random_tensor, rows_of
from tests.support.kernels import kernel_bits


def print_bits() -> None:
    """Print digests of the result of every kernel, in the child process."""
    kernel_bits.main(["small", "large"])
    team = Team()
    outputs = []
    for dtype in (torch.bfloat16, torch.float32):
        gate, up = (
            PackedWeight(random_tensor(70, 50, dtype=dtype, seed=seed), None, team)
            for seed in (1, 2)
        )
        x = random_tensor(40, 50, dtype=dtype, seed=3)
        outputs += [
            gate.multiply(x),
            gate.multiply_gated(x, up),
            gate.rows(torch.arange(70)),
            PackedGroup([gate, up], [up, gate], team).multiply_runs(x, [(0, 7), (1, 33)]),
        ]
        for contexts, counts, head_dim in (([20, 3], [5, 1], 24), ([100], [60], 33)):
            plan = rows_of(contexts, counts, 16)
            pages = random_tensor(plan.tables.numel() + 1, 2, 1, 16, head_dim, dtype=dtype, seed=4)
            queries = random_tensor(sum(counts), 2, head_dim, dtype=dtype, seed=5)
            outputs.append(attend_in_place(pages, queries, plan, 0.2, team))
    print(
        *(hashlib.sha256(output.float().numpy().tobytes()).hexdigest()[:16] for output in outputs)
    )


def test_kernels_read_no_uninitialized_and_write_no_freed_memory() -> None:
    """glibc fills what is freed with one byte and what it hands out with another: here NaN and 0,
    there the like of 1e-38 and 3e38. All memory is its heap's."""
    command, outputs = (
        [sys.executable, "-c", f"from {__name__} import print_bits; print_bits()"],
        [],
    )
    for freed in (0xFF, 0x80):
        tunables = {"perturb": freed, "tcache_count": 0, "mmap_threshold": 1 << 30}
        environment = os.environ | {
            "GLIBC_TUNABLES": ":".join(
                f"glibc.malloc.{key}={value}" for key, value in tunables.items()
            )
        }
        outputs.append(
            subprocess.run(
                command, check=True, capture_output=True, text=True, env=environment
            ).stdout
        )
    assert len(outputs[0].split()) > 20
    assert outputs[0] == outputs[1]
