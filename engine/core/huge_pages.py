"""Memory of the host in huge pages, if the kernel has them.

Small ones need an address translation for each 4 KiB, and processors stop there reading ahead.
"""

import mmap
from contextlib import suppress


def map_memory(num_bytes: int) -> mmap.mmap:
    """Return cleared memory of this process, which begins at a page and takes space once used.

    Raises:
        OSError: the address space, or the memory that the kernel may promise, is exhausted.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # another system, or a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
