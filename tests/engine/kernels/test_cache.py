"""Kernels that move cache entries, against plain indexing."""

import pytest
import torch

from engine.kernels.device.cache import write_kv


@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype"), [(3, 6, torch.float32), (2, 16, torch.bfloat16)]
)
def test_keys_and_values_go_to_their_pages(heads: int, head_dim: int, dtype: torch.dtype) -> None:
    k, v = torch.randn(2, 5, heads, head_dim).to(dtype)
    pages, offsets = torch.tensor([1, 1, 3, 4, 2]), torch.tensor([0, 3, 2, 1, 0])
    pool = torch.full((6, 2, heads, 4, head_dim), 7.0, dtype=dtype)
    expected = pool.clone()
    expected[pages, 0, :, offsets], expected[pages, 1, :, offsets] = k, v
    write_kv(pool, k, v, pages, offsets)
    assert torch.equal(pool, expected)


def test_nothing_to_do() -> None:
    pool = torch.zeros(2, 2, 1, 4, 8)
    none = torch.empty(0, dtype=torch.int64)
    write_kv(pool, torch.empty(0, 1, 8), torch.empty(0, 1, 8), none, none)
    assert not pool.any()
