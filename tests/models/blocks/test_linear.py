"""Linear layers against a plain product, and the bits of their rows under any row count."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.core.numerics import Numerics, padded_rows
from models.blocks.linear import Linear

DTYPES = [torch.float32, torch.bfloat16]
COUNTS = [*range(1, 18), 31, 32, 33, 63, 64, 65, 100]


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_a_cpu_without_bf16_products_in_onednn_multiplies_all_the_same() -> None:
    """As many laptops have. oneDNN looks at the limit when it is first used, so that takes a process of its own."""
    program = ("import torch\n"
               "from models.blocks.linear import Linear\n"
               "weight, x = torch.randn(24, 16).bfloat16(), torch.randn(7, 16).bfloat16()\n"
               "print(torch.allclose(Linear(weight)(x).float(), x.float() @ weight.float().T, rtol=1e-2, atol=1e-2))\n")
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"},
                          capture_output=True, text=True, timeout=280, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


@pytest.mark.parametrize("numerics", list(Numerics))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no-bias"])
def test_product(dtype: torch.dtype, biased: bool, numerics: Numerics) -> None:  # noqa: FBT001
    weight, bias, x = draw(24, 16, dtype=dtype), draw(24, dtype=dtype, seed=1), draw(7, 16, dtype=dtype, seed=2)
    linear = Linear(weight, biases=[bias] if biased else [], numerics=numerics)
    expected = F.linear(x.double(), weight.double(), bias.double() if biased else None)
    torch.testing.assert_close(linear(x).double(), expected, rtol=1e-5 if dtype is torch.float32 else 1e-2, atol=1e-2)
    assert linear(x).dtype is dtype
    assert (linear.in_features, linear.out_features) == (16, 24)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_weights_give_their_outputs_one_after_the_other(dtype: torch.dtype) -> None:
    weights = [draw(n, 16, dtype=dtype, seed=n) for n in (8, 4, 12)]
    biases = [draw(n, dtype=dtype, seed=n + 50) for n in (8, 4, 12)]
    x = draw(5, 16, dtype=dtype, seed=3)
    parts = torch.split(Linear(*weights, biases=biases)(x), [8, 4, 12], -1)
    for part, weight, bias in zip(parts, weights, biases, strict=True):
        torch.testing.assert_close(part, F.linear(x, weight, bias), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 192), (704, 256), (1024, 512), (300, 3072)])
def test_a_row_has_the_same_bits_in_any_number_of_rows(threads: int, dtype: torch.dtype,
                                                      shape: tuple[int, int]) -> None:
    linear = Linear(draw(*shape, dtype=dtype))
    x = draw(120, shape[1], dtype=dtype, seed=1)
    expected = linear(x)
    for count in COUNTS:
        for start in (0, 7):
            assert torch.equal(linear(x[start : start + count]), expected[start : start + count]), count


@pytest.mark.parametrize("numerics", list(Numerics))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("num_rows", [0, 1, 7])
def test_what_follows_a_product(num_rows: int, biased: bool, dtype: torch.dtype, numerics: Numerics) -> None:  # noqa: FBT001
    weight, bias, x = draw(24, 16, dtype=dtype), draw(24, dtype=dtype, seed=1), draw(num_rows, 16, dtype=dtype, seed=2)
    factor = draw(num_rows, 24, dtype=dtype, seed=3)
    linear = Linear(weight, biases=[bias] if biased else [], numerics=numerics)
    product = F.linear(x.double(), weight.double(), bias.double() if biased else None)
    bound = 1e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(linear.silu(x).double(), F.silu(product), rtol=bound, atol=bound)
    torch.testing.assert_close(linear.times(x, factor).double(), product * factor.double(), rtol=bound, atol=bound)
    assert linear.silu(x).dtype is linear.times(x, factor).dtype is dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(704, 256), (300, 3072)])
def test_what_follows_a_product_has_the_same_bits_in_any_number_of_rows(threads: int, dtype: torch.dtype,
                                                                       shape: tuple[int, int]) -> None:
    linear = Linear(draw(*shape, dtype=dtype))
    x, factor = draw(120, shape[1], dtype=dtype, seed=1), draw(120, shape[0], dtype=dtype, seed=2)
    silu, times = linear.silu(x), linear.times(x, factor)
    for count in COUNTS:
        rows = slice(7, 7 + count)
        assert torch.equal(linear.silu(x[rows]), silu[rows]), count
        assert torch.equal(linear.times(x[rows], factor[rows]), times[rows]), count


@pytest.mark.parametrize("dtype", DTYPES)
def test_where_the_weight_lay_does_not_show(dtype: torch.dtype) -> None:
    weight, x = draw(96, 64, dtype=dtype), draw(9, 64, dtype=dtype, seed=1)
    expected = Linear(weight)(x)
    for shift in range(1, 16):
        moved = torch.empty(weight.numel() + 16, dtype=dtype)[shift : shift + weight.numel()].view(96, 64)
        moved.copy_(weight)
        assert torch.equal(Linear(moved)(x), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows(dtype: torch.dtype) -> None:
    assert Linear(draw(24, 16, dtype=dtype))(torch.empty(0, 16, dtype=dtype)).shape == (0, 24)


def test_biases_must_match_the_weights() -> None:
    with pytest.raises(ValueError, match="2 fused weights"):
        Linear(torch.zeros(2, 2), torch.zeros(2, 2), biases=[torch.zeros(2)])


@pytest.mark.parametrize(("num_rows", "dtype", "expected"), [
    (1, torch.float32, 4), (4, torch.float32, 4), (5, torch.float32, 8), (9, torch.float32, 12),
    (12, torch.float32, 12), (13, torch.float32, 13), (1, torch.bfloat16, 4), (2, torch.bfloat16, 2),
])
def test_padded_rows(num_rows: int, dtype: torch.dtype, expected: int) -> None:
    assert padded_rows(num_rows, dtype) == expected
