"""Products in eight bits: their bits are those of the definition in whole numbers, for any rows,
threads and CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.core.layer_range import eighth
from engine.kernels.host.codegen.compiled import Team
from engine.kernels.host.linear.packed_linear import PackedGroup, PackedWeight
from runtime.errors import InternalError
from tests.engine.kernels.test_packed_linear import COUNTS, SHAPES, random_tensor

TYPES = [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.long)]


def packed(weight: Tensor, bias: Tensor | None = None) -> PackedWeight:
    return PackedWeight(weight, bias, Team(), in_bytes=True)


def coded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and scales of the eighths of each row: [M, 8, terms] fp64, [M, 8] fp32. A
    product of two fp32 is exact in fp64."""
    own = -(-x.shape[1] // 16) * 2  # pairs of terms
    parts = F.pad(x.float(), (0, 8 * own - x.shape[1])).view(-1, 8, own)
    highest = parts.abs().amax(-1) if own else torch.zeros(parts.shape[:2])
    factors = torch.where(
        highest > 0, torch.full_like(highest, 127.0) / highest, 0.0
    )  # a number / it takes 1 / it
    return torch.round(parts.double() * factors.double()[..., None]), highest / 127.0


def described(x: Tensor, weight: Tensor) -> Tensor:
    return multiplied(coded(x), coded(weight))


def multiplied(x: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor]) -> Tensor:
    (codes, scales), (weights, of_columns) = x, weight
    sums = torch.einsum("msk,nsk->mns", codes, weights).float() * of_columns * scales[:, None]
    while sums.shape[2] > 1:
        sums = sums[..., ::2] + sums[..., 1::2]
    return sums[..., 0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TYPES)
def test_the_bits_are_the_described_ones(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight, x = random_tensor(*shape, dtype=dtype), random_tensor(40, shape[1], dtype=dtype, seed=1)
    product, expected = packed(weight), described(x, weight)
    for count in (1, 2, 7, 16, 17, 33, 40):
        assert torch.equal(
            product.multiply(x[:count], out_dtype=torch.float32), expected[:count]
        ), count
    assert torch.equal(product.multiply(x), expected.to(dtype))


@pytest.mark.parametrize("dtype", TYPES)
def test_epilogues_are_as_for_other_products(dtype: torch.dtype) -> None:
    weight, up, bias = (
        random_tensor(40, 96, dtype=dtype),
        random_tensor(40, 96, dtype=dtype, seed=1),
        random_tensor(40, dtype=dtype, seed=2),
    )
    x, residual = (
        random_tensor(9, 96, dtype=dtype, seed=3),
        random_tensor(9, 40, dtype=dtype, seed=4),
    )
    plain = described(x, weight)
    assert torch.equal(
        packed(weight, bias).multiply(x, residual=residual),
        (plain + bias.float() + residual.float()).to(dtype),
    )
    gated = packed(weight, bias).multiply_gated(x, packed(up))
    torch.testing.assert_close(
        gated.float(), F.silu(plain + bias.float()) * described(x, up), rtol=2e-2, atol=1e-5
    )


@pytest.mark.parametrize("dtype", TYPES)
def test_rows_that_were_codes_keep_them_and_their_scale(dtype: torch.dtype) -> None:
    """Every code of a byte, in eighths that have high ones and eighths that have not; of every
    third row none known."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(-128, 128, (300, 250), generator=generator)
    codes[:, 90:160] //= 16
    scales = torch.rand(300, generator=generator).mul_(0.01).add_(1e-4)
    weight, x = (codes * scales[:, None]).to(dtype), random_tensor(9, 250, dtype=dtype, seed=2)
    kept = scales.clone()
    kept[::3] = 0
    product = PackedWeight(weight, None, Team(), in_bytes=True, row_scales=kept)
    own = F.pad(codes, (0, 6)).view(300, 8, 32).double(), scales[:, None].expand(-1, 8)
    expected = multiplied(coded(x), own)
    expected[:, ::3] = described(x, weight)[:, ::3]
    assert torch.equal(product.multiply(x, out_dtype=torch.float32), expected)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_has_the_same_bits_in_any_number_of_rows_and_threads(
    dtype: torch.dtype, num_threads: int
) -> None:
    weight, up = (
        packed(random_tensor(130, 250, dtype=dtype)),
        packed(random_tensor(130, 250, dtype=dtype, seed=1)),
    )
    x = random_tensor(300, 250, dtype=dtype, seed=2)
    whole, gated, before = weight.multiply(x), weight.multiply_gated(x, up), torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for count in COUNTS:
            rows = slice(5, 5 + count)
            assert torch.equal(weight.multiply(x[rows]), whole[rows]), count
            assert torch.equal(weight.multiply_gated(x[rows], up), gated[rows]), count
        grouped = PackedGroup([weight, up], [up, weight], Team()).multiply_runs(
            x, [(0, 7), (1, 293)]
        )
    finally:
        torch.set_num_threads(before)
    assert torch.equal(grouped[:7], gated[:7])
    assert torch.equal(grouped[7:], up.multiply_gated(x, weight)[7:])


@pytest.mark.parametrize("num_terms", [80, 100])
@pytest.mark.parametrize("num_parts", [2, 4, 8])
@pytest.mark.parametrize("dtype", TYPES)
def test_parts_of_the_terms_add_up_to_the_whole_sum(
    dtype: torch.dtype, num_parts: int, num_terms: int
) -> None:
    """80 terms: eighths of 10 are no whole words of four codes. 100: the last eighth has 2 of
    14."""
    weight, x = (
        random_tensor(33, num_terms, dtype=dtype),
        random_tensor(40, num_terms, dtype=dtype, seed=1),
    )
    each = eighth(num_terms) * (8 // num_parts)
    pieces = zip(torch.split(x, each, 1), torch.split(weight, each, 1), strict=True)
    sums = [
        PackedWeight(
            columns,
            None,
            Team(),
            num_segments=8 // num_parts,
            segment_terms=eighth(num_terms),
            in_bytes=True,
        ).multiply(part, out_dtype=torch.float32)
        for part, columns in pieces
    ]
    while len(sums) > 1:
        sums = [first + second for first, second in zip(sums[::2], sums[1::2], strict=True)]
    assert torch.equal(sums[0], packed(weight).multiply(x, out_dtype=torch.float32))


@pytest.mark.parametrize("dtype", TYPES)
def test_nan_stays_in_its_row_and_column(dtype: torch.dtype) -> None:
    weight, x = random_tensor(40, 24, dtype=dtype), random_tensor(13, 24, dtype=dtype, seed=1)
    expected = packed(weight).multiply(x)
    x[4, 2], x[5, 3], weight[17, 3] = float("nan"), float("-inf"), float("inf")
    result = packed(weight).multiply(x)
    assert result[4:6].isnan().all()
    assert result[:, 17].isnan().all()
    others = torch.ones(13, 40, dtype=torch.bool)
    others[4:6], others[:, 17] = False, False
    assert torch.equal(result[others], expected[others])


@pytest.mark.parametrize("dtype", TYPES)
def test_the_least_and_the_highest_magnitudes(dtype: torch.dtype) -> None:
    """An eighth of zeros, or of hardly more, is 0; one of the largest numbers is not infinite."""
    weight, x = random_tensor(16, 16, dtype=dtype), torch.zeros(3, 16, dtype=dtype)
    x[1], x[2] = 1e-38, 3e38
    assert torch.equal(packed(weight).multiply(x[:2]), torch.zeros(2, 16, dtype=dtype))
    assert packed(weight * 2.0**-20).multiply(x[2:]).isfinite().all()


def test_empty_and_mismatched_operands() -> None:
    assert packed(random_tensor(24, 16)).multiply(random_tensor(0, 16)).shape == (0, 24)
    assert packed(random_tensor(0, 16)).multiply(random_tensor(3, 16)).shape == (3, 0)
    with pytest.raises(InternalError, match="beside up"):
        packed(random_tensor(24, 16)).multiply_gated(
            random_tensor(2, 16), PackedWeight(random_tensor(24, 16), None, Team())
        )
    with pytest.raises(InternalError, match="eight bits"):
        packed(random_tensor(24, 16)).rows(torch.tensor([1]))


def test_a_weight_takes_a_byte() -> None:
    """And four more for each eighth of a row."""
    product = packed(random_tensor(512, 1024, dtype=torch.bfloat16))
    assert product.scales is not None
    assert product.blocks.nbytes + product.scales.nbytes == 512 * (1024 + 8 * 4)


@pytest.mark.parametrize(
    ("name", "features"),
    [
        ("haswell", "+avx2,+fma"),
        ("icelake-server", "+avx512f,+avx512bw,+avx512vl,+avx512vnni,+avx2,+fma"),
    ],
    ids=["avx2", "avx512-vnni"],
)
@pytest.mark.long
def test_every_cpu_gives_the_same_bits(name: str, features: str) -> None:
    """numba compiles for the CPU that its variables name."""
    if name == "icelake-server" and "avx512_vnni" not in Path("/proc/cpuinfo").read_text():
        return  # this machine has no such instructions
    variables = {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"] * 2


PROGRAM = """
import torch
from tests.engine.kernels.test_int8 import described, packed
torch.manual_seed(0)
weight, x = torch.randn(70, 300).bfloat16(), torch.randn(37, 300).bfloat16()
product = packed(weight)
print(torch.equal(product.multiply(x, out_dtype=torch.float32), described(x, weight)))
print(torch.equal(product.multiply_gated(x, product)[3:4], product.multiply_gated(x[3:4], product)))
"""
