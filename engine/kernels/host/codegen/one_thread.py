"""The number of threads of work beside the steps."""

import ctypes
import os
from contextlib import suppress

import torch

from engine.kernels.host.codegen.compiled import TORCH_LIBRARY

NICENESS = 5  # of threads that stand back, added to that of the process


def use_one_thread() -> None:
    """Have torch's operations and the kernels of the calling thread use no other threads.

    Other threads keep theirs. `torch.set_num_threads` would change those that begin later.
    """
    torch.get_num_threads()  # torch sets this thread's number with its first operation
    with suppress(AttributeError, OSError):  # no OpenMP, or a library with another name
        ctypes.CDLL(str(TORCH_LIBRARY)).omp_set_num_threads(1)


def stand_back() -> None:
    """Have the calling thread use one core, and other threads of the process go first."""
    os.nice(NICENESS)
    use_one_thread()
