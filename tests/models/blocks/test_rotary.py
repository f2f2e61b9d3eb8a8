"""Rotary embedding as a rotation of the plane, and its bits in any number of rows."""

import numpy as np
import pytest
import torch
from torch import Tensor

from models.blocks.rotary import RopeSpec, Rotary, inverse_frequencies

POSITIONS = torch.tensor([0, 1, 2, 17, 4095])


def heads(num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(
        num_tokens, num_heads, head_dim, generator=torch.Generator().manual_seed(0)
    ).to(dtype)


@pytest.mark.parametrize("dim", [8, 12])
def test_pairs_turn_like_complex_numbers(dim: int) -> None:
    x = heads(len(POSITIONS), 3, 12, torch.float32)
    table = Rotary(spec=RopeSpec(dim=dim, theta=100.0), dtype=torch.float32).table(POSITIONS)
    angles = POSITIONS[:, None, None].double() * 100.0 ** (-torch.arange(0, dim, 2).double() / dim)
    turn = torch.polar(torch.ones_like(angles), angles)
    by_half = torch.complex(x[..., : dim // 2].double(), x[..., dim // 2 : dim].double()) * turn
    by_pair = torch.complex(x[..., 0:dim:2].double(), x[..., 1:dim:2].double()) * turn
    for turned, result in ((by_half, table.rotate_halves(x)), (by_pair, table.rotate_pairs(x))):
        expected = torch.cat([turned.real, turned.imag, x[..., dim:].double()], -1)
        torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "head_dim"), [(24, 128), (3, 24), (2, 8)])
def test_a_token_has_the_same_bits_in_any_number_of_tokens(
    num_heads: int, head_dim: int, dtype: torch.dtype, threads: int
) -> None:
    before = torch.get_num_threads()
    x, rotary = (
        heads(200, num_heads, head_dim, dtype),
        Rotary(spec=RopeSpec(dim=head_dim, theta=1e4), dtype=dtype),
    )
    alone = torch.cat(
        [rotary.table(torch.tensor([at])).rotate_halves(x[at : at + 1]) for at in range(200)]
    )
    torch.set_num_threads(threads)
    try:
        for count in (2, 3, 7, 64, 199, 200):
            table = rotary.table(torch.arange(count))
            assert torch.equal(table.rotate_halves(x[:count]), alone[:count]), count
    finally:
        torch.set_num_threads(before)


def test_tables_are_the_nearest_numbers_to_the_cosines_of_rounded_angles() -> None:
    """No library's cosine matters, also at half a million positions and with any neighbors of a
    token."""
    spec = RopeSpec(dim=64, theta=1e4)
    further = torch.randint(1 << 20, (5000,), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(5000), further])
    table = Rotary(spec=spec, dtype=torch.float32).table(positions)
    angles = (positions[:, None].float() * inverse_frequencies(spec)).double().numpy()
    assert torch.equal(table.cos[:, 0], torch.from_numpy(np.cos(angles).astype(np.float32)))
    assert torch.equal(table.sin[:, 0], torch.from_numpy(np.sin(angles).astype(np.float32)))
    alone = Rotary(spec=spec, dtype=torch.float32).table(positions[7777:7778])
    assert torch.equal(alone.cos[0], table.cos[7777])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_table_is_stretched_and_rounded_once(dtype: torch.dtype) -> None:
    """Also in a type that kernels do not know."""
    spec = RopeSpec(dim=8, theta=1e4, amplitude=1.25)
    table = Rotary(spec=spec, dtype=dtype).table(torch.arange(100))
    angles = (torch.arange(100)[:, None].float() * inverse_frequencies(spec)).double()
    assert torch.equal(table.cos[:, 0], (angles.cos().float() * 1.25).to(dtype))
    assert torch.equal(table.sin[:, 0], (angles.sin().float() * 1.25).to(dtype))
