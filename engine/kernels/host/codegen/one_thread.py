"""The number of threads of work beside the steps."""

import ctypes
from contextlib import suppress

import torch

from engine.kernels.host.codegen.compiled import TORCH_LIBRARY


def use_one_thread() -> None:
    """Have torch's operations and the kernels of the calling thread use no other threads.

    Other threads keep theirs. `torch.set_num_threads` would change those that begin later.
    """
    torch.get_num_threads()  # torch sets this thread's number with its first operation
    with suppress(AttributeError, OSError):  # no OpenMP, or a library with another name
        ctypes.CDLL(str(TORCH_LIBRARY)).omp_set_num_threads(1)
