"""torch's own threads, for compiled code of ours."""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

_LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
_FORM = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Team:
    """Runs a function on as many threads as torch's products have, and on the same ones: OpenMP's threads wait for work
    by spinning, so threads of another pool would have to share their cores with them."""

    def __init__(self) -> None:
        # GOMP_parallel(function, data, num_threads, flags) is how gcc's code starts a parallel region; torch brings the
        # library that has it, and another OpenMP than gcc's answers to this name, too.
        self._parallel = _gomp_parallel()

    def run(self, function: int, argument: int, *, num_parts: int) -> None:
        """Call the C function `void (*)(void *)` at that address with the argument, on every thread, but not on more
        than there are parts; returns when all have. They must agree among themselves who does what."""
        num_threads = min(torch.get_num_threads(), num_parts)
        if num_threads <= 1 or self._parallel is None:
            _callable(function)(argument)
        else:
            self._parallel(function, argument, num_threads, 0)


@cache
def _callable(function: int) -> Callable[[int], None]:
    return _FORM(function)


@cache
def _gomp_parallel() -> Callable[[int, int, int, int], None] | None:
    """None in a build of torch without OpenMP, or with another name for its library."""
    form = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    try:
        return form(("GOMP_parallel", ctypes.CDLL(str(_LIBRARY))))
    except (AttributeError, OSError):
        return None
