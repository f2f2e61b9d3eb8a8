"""Sums and copies of rows against torch's, bit by bit."""

import pytest
import torch

from engine.kernels.host.codegen.compiled import Team
from engine.kernels.host.tokens.row_ops import (
    RecordMoves,
    add_rows,
    copy_rows,
    gather_rows,
    join_rows,
    largest_of_rows,
)
from runtime.errors import InternalError

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@DTYPES
@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (3, 7, 5), (40, 1000)])
def test_sums(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, y = (torch.randn(shape).mul(100).to(dtype) for _ in range(2))
    if x.numel() > 100:
        x.view(-1)[:4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    assert torch.equal(add_rows(x, y, Team()).nan_to_num(-7.0), (x + y).nan_to_num(-7.0))


@DTYPES
@pytest.mark.parametrize("shape", [(1, 3, 8), (33, 5, 16)])
def test_copies_of_strided_rows(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    whole = torch.randn(shape[0], shape[1] + 4, shape[2]).to(dtype)
    rows = whole[:, 2 : 2 + shape[1]]
    copy = copy_rows(rows, Team())
    assert copy.is_contiguous()
    assert torch.equal(copy, rows)


@pytest.mark.parametrize("moves", [[(3, 1)], [(0, 4), (8, 0), (3, 2)]])
def test_records_move_in_every_pair_and_nothing_else_changes(moves: list[tuple[int, int]]) -> None:
    pairs = [
        (torch.randn(9, 3, 7).bfloat16(), torch.randn(5, 3, 7).bfloat16()),
        (torch.randn(9, 11), torch.randn(5, 11)),
    ]
    expected = [target.clone() for _, target in pairs]
    for (source, _), target in zip(pairs, expected, strict=True):
        for a, b in moves:
            target[b] = source[a]
    RecordMoves(pairs).run(moves)
    assert all(
        torch.equal(found, target) for (_, found), target in zip(pairs, expected, strict=True)
    )


@pytest.mark.parametrize("move", [(9, 0), (-1, 0), (0, 5), (0, -1)])
def test_records_that_are_not_there_are_refused(move: tuple[int, int]) -> None:
    moves = RecordMoves(
        [(torch.zeros(9, 2), torch.zeros(5, 2)), (torch.zeros(12, 2), torch.zeros(7, 2))]
    )
    with pytest.raises(InternalError, match=r"of \(9, 5\)$"):
        moves.run([(0, 0), move])


@DTYPES
@pytest.mark.parametrize("widths", [(5,), (24, 7, 16)])
def test_rows_are_joined(dtype: torch.dtype, widths: tuple[int, ...]) -> None:
    parts = [torch.randn(33, 2 * width).to(dtype)[:, :width] for width in widths]
    assert torch.equal(join_rows(parts, Team()), torch.cat(parts, -1))


@DTYPES
def test_rows_are_gathered(dtype: torch.dtype) -> None:
    table, indices = torch.randn(50, 40).to(dtype)[:, 3:20], torch.randint(50, (70,))
    assert torch.equal(gather_rows(table, indices, Team()), table[indices])


@pytest.mark.parametrize("index", [-1, 50, 1 << 40])
def test_rows_that_a_table_does_not_have_are_refused(index: int) -> None:
    with pytest.raises(InternalError, match="a kernel ended after"):
        gather_rows(torch.zeros(50, 8), torch.tensor([3, index]), Team())


@pytest.mark.parametrize("width", [1, 63, 64, 736, 1000])
def test_the_largest_of_a_row_equals_torch(width: int) -> None:
    rows = torch.randn(20, width)
    rows[1], rows[2] = 3.0, -torch.inf
    rows[3, width // 2 :], rows[4, width // 3] = 9.0, torch.nan
    rows[5, -1], rows[5, width // 2], rows[6, 0] = torch.nan, torch.nan, torch.nan
    rows[7, width // 2], rows[8] = torch.inf, torch.nan
    assert torch.equal(largest_of_rows(rows, Team()), rows.argmax(-1))
