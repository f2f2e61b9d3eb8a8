"""Memory of caches: allocated when it is used, or in the background; the contents are unchanged."""

import ctypes
import errno
import logging
import os
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from engine.memory.cache_memory import allocate_in_background, cleared_cache

HOST = torch.device("cpu")
NUM_BYTES = 256 << 20


def resident_bytes() -> int:
    """Return the memory that this process has."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_cache_takes_memory_when_it_is_used_or_allocated() -> None:
    before = resident_bytes()
    cache = cleared_cache((4, NUM_BYTES // 8), torch.bfloat16, HOST)
    assert resident_bytes() - before < NUM_BYTES // 8
    cache[2, 5:9] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert resident_bytes() - before < NUM_BYTES // 8
    thread = allocate_in_background([cache])
    cache[3, -1] = 7.0
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert resident_bytes() - before >= NUM_BYTES
    assert cache[2, 4:10].tolist() == [0, 1, 2, 3, 4, 0]
    assert cache[3, -1] == 7
    assert torch.count_nonzero(cache) == 5


@pytest.mark.parametrize(
    ("shape", "dtype"), [((0, 4), torch.float32), ((3, 5), torch.int64), ((1,), torch.bfloat16)]
)
def test_a_cache_is_a_tensor_of_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    cache = cleared_cache(shape, dtype, HOST)
    assert cache.is_contiguous()
    assert (cache.shape, cache.dtype) == (shape, dtype)
    assert not torch.count_nonzero(cache)
    cache += 1
    assert cache.sum() == cache.numel()


def test_a_cache_outlives_its_creator() -> None:
    """The tensor owns the mapping, and so do its views."""
    view = cleared_cache((1 << 20,), torch.uint8, HOST)[5:]
    view[-1] = 3
    assert view.sum() == 3


class Library(NamedTuple):
    """A C library whose `madvise` fails."""

    madvise: Callable[..., int]


@pytest.mark.parametrize(
    ("code", "says"),
    [(errno.EINVAL, []), (errno.ENOMEM, ["cannot allocate the cache ahead: Cannot allocate"])],
)
def test_a_kernel_that_cannot_allocate_ahead_leaves_it_to_use(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int, says: list[str]
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name, use_errno: Library(lambda *piece: -1))
    monkeypatch.setattr(ctypes, "get_errno", lambda: code)
    cache = cleared_cache((1 << 20,), torch.uint8, HOST)
    with caplog.at_level(logging.WARNING):
        allocate_in_background([cache, cache]).join(timeout=60)
    assert [
        record.getMessage()[: len(text)] for record, text in zip(caplog.records, says, strict=True)
    ] == says
