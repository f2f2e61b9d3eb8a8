"""Memory that steps free and allocate again: pages that the kernel must clear each time cost as
much as a kernel's work."""

import os
import subprocess
import sys

STEPS = """
import resource, sys, threading
import torch
from engine.memory.heap import keep_freed_memory

def step() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    taken = [torch.empty(mib << 20, dtype=torch.uint8) for mib in (4, 16, 12, 12, 16, 8, 4)]
    for tensor in taken:
        tensor[::4096] = 1
    del taken, tensor
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def steps() -> None:
    print(sorted([step() for _ in range(60)][40:])[10])

torch.set_num_threads(1)
if "keeps" in sys.argv:
    assert keep_freed_memory()
thread = threading.Thread(target=steps)  # as the engine's is
thread.start()
thread.join()
"""


def faults_of_a_step(*arguments: str) -> int:
    """Return the median page faults of the last steps, with huge pages as workers use.

    The heap takes twenty steps to reach its size. If memory is returned, some steps still find
    their pages in place.
    """
    child = subprocess.run(
        [sys.executable, "-c", STEPS, *arguments],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "THP_MEM_ALLOC_ENABLE": "1"},
    )
    return int(child.stdout)


def test_a_step_reuses_memory_freed_by_the_one_before() -> None:
    assert faults_of_a_step("keeps") < 10 < 100 < faults_of_a_step()
