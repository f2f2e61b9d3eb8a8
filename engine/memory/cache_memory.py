"""Memory of caches on the host, which the kernel clears page by page.

Clearing all of it at once takes up to a second per GiB. A worker serves meanwhile.
"""

import ctypes
import errno
import logging
import math
import os
import threading
import time
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from engine.core.huge_pages import map_memory

logger = logging.getLogger(__name__)

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14; Python does not name it
_PIECE_BYTES = 8 << 20
_PAUSES = 3  # per working time: the rest is for requests, which come meanwhile


def cleared_cache(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of zeros. On the host, its memory is allocated when it is first used.

    Raises:
        OSError: the address space or the memory that the kernel may promise is exhausted.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.zeros(*shape, dtype=dtype, device=device)
    return torch.frombuffer(map_memory(num_bytes), dtype=dtype).view(*shape)


def allocate_in_background(caches: Iterable[Tensor]) -> threading.Thread:
    """Start a thread that has the kernel allocate `caches` of `cleared_cache`, and return it.

    So a worker takes its memory soon after its start, and not at its first peak. The contents are
    unchanged, and may be used meanwhile. A kernel before Linux 5.14 allocates the memory when it is
    used.
    """
    thread = threading.Thread(
        target=_allocate, args=(list(caches),), name="allocate-caches", daemon=True
    )
    thread.start()
    return thread


def _allocate(caches: list[Tensor]) -> None:
    advise = ctypes.CDLL(None, use_errno=True).madvise
    while caches:
        cache = caches.pop()
        for start in range(0, cache.nbytes, _PIECE_BYTES):
            began_s = time.monotonic()
            length = min(_PIECE_BYTES, cache.nbytes - start)
            piece = ctypes.c_void_p(cache.data_ptr() + start), ctypes.c_size_t(length)
            if advise(*piece, _POPULATE_WRITE):
                code = ctypes.get_errno()
                if code != errno.EINVAL:
                    logger.warning("cannot allocate the cache ahead: %s", os.strerror(code))
                return
            time.sleep(_PAUSES * (time.monotonic() - began_s))
