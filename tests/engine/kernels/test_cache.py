"""Kernels that move cache entries, against plain indexing; and the digest, against its formula in Python integers."""

import struct

import pytest
import torch

from engine.kernels.device.cache import gather_records, scatter_records, write_kv
from engine.kernels.device.digest import record_digests

MASK = (1 << 64) - 1


@pytest.mark.parametrize(("heads", "head_dim", "dtype"), [(3, 6, torch.float32), (2, 16, torch.bfloat16)])
def test_keys_and_values_go_to_their_pages(heads: int, head_dim: int, dtype: torch.dtype) -> None:
    k, v = torch.randn(2, 5, heads, head_dim).to(dtype)
    pages, offsets = torch.tensor([1, 1, 3, 4, 2]), torch.tensor([0, 3, 2, 1, 0])
    pool = torch.full((6, 2, heads, 4, head_dim), 7.0, dtype=dtype)
    expected = pool.clone()
    expected[pages, 0, :, offsets], expected[pages, 1, :, offsets] = k, v
    write_kv(pool, k, v, pages, offsets)
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("shape", [(3, 500), (7,), (2, 2, 1024)])
def test_records_are_gathered_and_scattered(shape: tuple[int, ...]) -> None:
    records = torch.randn(9, *shape)
    indices = torch.tensor([5, 0, 7], dtype=torch.int32)
    taken = gather_records(records, indices)
    assert torch.equal(taken, records[indices.long()])
    other, expected = torch.full((9, *shape), 7.0), torch.full((9, *shape), 7.0)
    expected[indices.long()] = taken
    scatter_records(taken, indices, other)
    assert torch.equal(other, expected)


def formula(record: bytes, seed: int) -> int:
    total = 0
    for index, (word,) in enumerate(struct.iter_unpack("<Q", record)):
        x = (word + (index + 1) * 0x9E3779B97F4A7C15 + seed) & MASK
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
        total += x ^ (x >> 31)
    return total & MASK


@pytest.mark.parametrize("num_words", [1, 5, 2048, 2049])
def test_digests_are_the_formula(num_words: int) -> None:
    records = torch.randint(-(2**63), 2**63 - 1, (4, num_words))
    seeds = torch.tensor([0, 1, -1, 2**62])
    digests = [digest & MASK for digest in record_digests(records, seeds).tolist()]
    assert digests == [formula(record.numpy().tobytes(), seed & MASK)
                       for record, seed in zip(records, seeds.tolist(), strict=True)]


def test_any_flipped_bit_and_any_two_words_that_trade_places_change_a_digest() -> None:
    record = torch.randint(-(2**63), 2**63 - 1, (1, 40))
    seed = torch.zeros(1, dtype=torch.int64)
    damaged = []
    for word in range(40):
        flipped = record.clone()
        flipped[0, word] ^= 1 << (word % 63)
        traded = record.clone()
        traded[0, [word, (word + 1) % 40]] = record[0, [(word + 1) % 40, word]]
        damaged += [flipped, traded]
    assert record_digests(record, seed) not in record_digests(torch.cat(damaged), seed.expand(80).contiguous())


def test_nothing_to_do() -> None:
    pool = torch.zeros(2, 2, 1, 4, 8)
    none = torch.empty(0, dtype=torch.int64)
    write_kv(pool, torch.empty(0, 1, 8), torch.empty(0, 1, 8), none, none)
    assert gather_records(pool, none).shape == (0, 2, 1, 4, 8)
    assert record_digests(torch.empty(0, 4), none).shape == (0,)
