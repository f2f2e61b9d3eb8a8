"""What a worker's heap does with memory that a step has freed."""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # glibc's malloc.h
_LARGEST_KEPT_BYTES = 32 << 20  # the highest that glibc takes
_KEPT_BYTES = 1 << 30


def keep_freed_memory() -> bool:
    """Keep it for the next step, which takes the same again. Given back to the kernel, it would
    come as pages that are cleared first, by the threads that wait for results. The heap grows to
    the most that a step needs at once.

    For threads that are started later, too: all take from one heap, since glibc gives back what
    those of other threads do not need. Returns False where the C library is not glibc.
    """
    try:
        set_option = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    settings = (
        (_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES),
        (_TRIM_THRESHOLD, _KEPT_BYTES),
        (_ARENA_MAX, 1),
    )
    return all(set_option(option, value) for option, value in settings)
