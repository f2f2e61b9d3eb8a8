"""Gates of rows against their formula in fp64, to the ends of fp32."""

import numpy as np
import pytest
from numba import int64, njit, void
from numpy.typing import NDArray

from engine.kernels.host.codegen.row_vectors import open_row


def opened_in_place(x: NDArray[np.float32], other: NDArray[np.float32]) -> None:
    def call(x: int, other: int, count: int) -> None:
        open_row(x, other, count)

    njit(void(int64, int64, int64))(call)(x.ctypes.data, other.ctypes.data, len(x))


@pytest.mark.parametrize("count", [0, 1, 15, 16, 4001])
def test_a_row_is_computed_by_the_formula(count: int) -> None:
    x = np.linspace(-80, 200, count, dtype=np.float32)
    other, wide = np.linspace(3, -2, count, dtype=np.float32), x.astype(np.float64)
    opened, behind = np.append(x, np.float32(7)), np.append(other, np.float32(7))
    opened_in_place(opened[:count], behind[:count])
    np.testing.assert_allclose(opened[:count], wide / (1 + np.exp(-wide)) * other, rtol=1.2e-5)
    assert opened[count] == 7, "nothing behind the row is written"


def test_the_ends_of_the_numbers_open_to_nothing_or_to_themselves() -> None:
    x = np.array([-np.inf, -3e38, -100, 0.0, 3e38, np.inf, np.nan], dtype=np.float32)
    opened = x.copy()
    opened_in_place(opened, np.ones_like(x))
    np.testing.assert_allclose(opened[:4], 0, atol=1e-33)
    assert list(opened[4:6]) == [np.float32(3e38), np.inf]
    assert np.isnan(opened[6])
