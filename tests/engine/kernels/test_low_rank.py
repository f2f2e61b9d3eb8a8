"""Updates of rows and gated products of rows that have updates, on the host."""

import pytest
import torch
from torch import Tensor

from engine.kernels.host.codegen.compiled import Team
from engine.kernels.host.linear.low_rank import UpFactor, add_update, update_items, update_table
from engine.kernels.host.tokens.gating import gate_rows
from runtime.errors import InternalError

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def drawn(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rank", "outputs"), [(1, 1), (3, 17), (16, 64), (20, 1500)])
def test_every_row_gets_its_own_update_and_no_other_row_any(
    dtype: torch.dtype, rank: int, outputs: int
) -> None:
    """With any number of adjacent rows of a factor, which the kernel takes four at a time."""
    factors = [drawn(rank, outputs, seed=seed, dtype=dtype) for seed in range(3)]
    counts = [7, 1, 66]
    index = torch.randperm(90, generator=torch.Generator().manual_seed(9))[: sum(counts)]
    before = drawn(90, outputs + 5, seed=4, dtype=dtype)
    h = drawn(len(index), rank + 2, seed=5, dtype=dtype)
    items = [update_items([UpFactor(factor, 2, 3)]) for factor in factors]
    after = before.clone()
    add_update(after, h, index, update_table(list(zip(items, counts, strict=True))), Team())
    expected, row = before.double(), 0
    for factor, count in zip(factors, counts, strict=True):
        for place in range(row, row + count):
            update = h[place, 2:].double() @ factor.double()
            expected[index[place], 3 : 3 + outputs] += update
        row += count
    torch.testing.assert_close(
        after.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )
    for place in range(len(index)):
        which = 0 if place < 7 else 1 if place < 8 else 2
        alone = before.clone()
        table = update_table([(items[which], 1)])
        add_update(alone, h[place : place + 1], index[place : place + 1], table, Team())
        assert torch.equal(alone[index[place]], after[index[place]]), place


def test_a_factor_of_too_many_terms_is_refused() -> None:
    with pytest.raises(InternalError, match="more than 512 terms"):
        update_items([UpFactor(torch.zeros(513, 8), 0, 0)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (5, 40), (70, 33)])
def test_gated_rows_are_those_of_the_formula(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Both parts may be columns of one tensor."""
    both = 3 * drawn(shape[0], 2 * shape[1], seed=1, dtype=dtype)
    gate, up = both.chunk(2, dim=1)
    wide = gate.double()
    expected = wide / (1 + (-wide).exp()) * up.double()
    found = gate_rows(gate, up, Team())
    assert found.dtype is dtype
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=TOLERANCE[dtype])
