"""Reuse of freed heap memory between the steps of a worker."""

import ctypes

# constants of glibc's malloc.h
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_ARENA_MAX = -8
_LARGEST_KEPT_BYTES = 32 << 20  # the maximum that glibc accepts
_KEPT_BYTES = 1 << 30


def keep_freed_memory() -> bool:
    """Keep freed memory in the heap for the next step, which allocates the same amount.

    Memory returned to the kernel comes back as pages that must be cleared first, in the threads
    that wait for results. The heap grows to the peak of a step.

    The setting includes threads that start later: all use one heap, because glibc returns unused
    memory of other threads' heaps. Return False if the C library is not glibc.
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
