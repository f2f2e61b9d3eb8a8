"""Products in eight and four bits: their bits are those of the definition in whole numbers, for any
rows, threads and CPU."""

import os
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.core.layer_range import eighth
from engine.core.numerics import WeightFormat
from engine.kernels.host.codegen.compiled import Team
from engine.kernels.host.linear.packed_linear import PackedGroup, PackedWeight
from models.blocks.kept_bytes import kept_bytes
from runtime.errors import InternalError
from tests.engine.kernels.test_packed_linear import COUNTS, SHAPES, random_tensor

TYPES = [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.long)]
FORMATS = [WeightFormat.INT8, WeightFormat.INT4]
both = pytest.mark.parametrize("weight_format", FORMATS)


def packed(
    weight: Tensor, bias: Tensor | None = None, weight_format: WeightFormat = WeightFormat.INT8
) -> PackedWeight:
    return PackedWeight(weight, bias, Team(), weight_format=weight_format)


def described(x: Tensor, weight: Tensor, weight_format: WeightFormat) -> Tensor:
    if weight_format is WeightFormat.INT8:
        return multiplied(coded(eighths(x)), coded(eighths(weight)))
    return added(coded(groups(x)), coded_groups(groups(weight), group_counts(weight.shape[1])))


def eighths(x: Tensor) -> Tensor:
    """Return [M, 8, terms] fp32."""
    own = -(-x.shape[1] // 16) * 2  # pairs of terms
    return F.pad(x.float(), (0, 8 * own - x.shape[1])).view(-1, 8, own)


def groups(x: Tensor) -> Tensor:
    """Return [M, 8, groups, 32] fp32: groups begin with an eighth or at a multiple of 32."""
    own = eighths(x).shape[2]
    parts = torch.zeros(len(x), 8, own // 32 + 2, 32)
    for term in range(x.shape[1]):
        segment, first = term // own, term // own * own
        group = term // 32 - first // 32
        parts[:, segment, group, term - max(first, term // 32 * 32)] = x[:, term].float()
    return parts


def group_counts(num_terms: int) -> Tensor:
    """Return the numbers of terms of the groups, [8, groups]."""
    return groups(torch.ones(1, num_terms))[0].sum(-1)


def coded(parts: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and scales: [..., terms] fp64, [...] fp32. A product of two fp32 is exact in
    fp64."""
    highest = parts.abs().amax(-1) if parts.shape[-1] else torch.zeros(parts.shape[:-1])
    factors = torch.where(
        highest > 0, torch.full_like(highest, 127.0) / highest, 0.0
    )  # a number / it takes 1 / it
    return torch.round(parts.double() * factors.double()[..., None]), highest / 127.0


def coded_groups(values: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [..., 32] fp64, scales [...] and offsets [...] fp32 of groups of weights
    [..., 32], of which the first `counts` [...] are weights."""
    are_weights = torch.arange(32) < counts[..., None]
    most = torch.where(are_weights, values, -torch.inf).amax(-1)
    least = torch.where(are_weights, values, torch.inf).amin(-1)
    extreme = torch.where(most + least > 0, most, least)
    width = most - least
    candidates = [(in_bf16(extreme * -0.125), in_bf16(extreme * -0.125) * -8)]
    for steps in (8, 9, 10, 11, 12, 13, 14, 16, 15):
        covering = in_bf16(width * torch.tensor(1 / steps))
        lowest = -0.5 if steps == 16 else (15 - steps) // 2
        candidates.append((covering, in_bf16(least - covering * lowest)))
    best = scale = offset = torch.full_like(most, torch.inf)
    for is_last in (False, True):
        for own, shift in [(scale, offset)] if is_last else reversed(candidates):
            fit = fitted(values, are_weights, torch.where(width == 0, 0.0, own), shift)
            errors = values - (codes_of(values, *fit) * fit[0][..., None] + fit[1][..., None])
            found = in_order(torch.where(are_weights, errors.square(), 0.0))
            scale, offset = (
                torch.where(found < best, *both) for both in zip(fit, (scale, offset), strict=True)
            )
            best = best.minimum(found)
    scale, offset = (torch.where(counts > 0, each, 0.0) for each in (scale, offset))
    return codes_of(values, scale, offset).double(), scale, offset


def fitted(
    values: Tensor, are_weights: Tensor, scale: Tensor, offset: Tensor
) -> tuple[Tensor, Tensor]:
    codes = torch.where(are_weights, codes_of(values, scale, offset), 0.0)
    count = are_weights.sum(-1).float()
    sums = [in_order(each) for each in (values, codes, values * codes, codes * codes)]
    spread = count * sums[3] - sums[1] * sums[1]
    slope = (count * sums[2] - sums[0] * sums[1]) / spread
    scale = torch.where(spread > 0, in_bf16(slope), scale)
    return scale, in_bf16((sums[0] - scale * sums[1]) / count)


def in_bf16(values: Tensor) -> Tensor:
    return values.bfloat16().float()


def codes_of(values: Tensor, scales: Tensor, offsets: Tensor) -> Tensor:
    inverse = torch.where(scales == 0, 0.0, torch.ones_like(scales) / scales)
    return ((values - offsets[..., None]) * inverse[..., None]).round().clamp(0, 15)


def in_order(values: Tensor) -> Tensor:
    """Add the last dimension one after the other."""
    total = torch.zeros(values.shape[:-1])
    for each in values.unbind(-1):
        total = total + each
    return total


def kept_codes(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [N, 32], scales [N] and offsets [N] of weights [N, n], n up to 32, as kept.

    Each group is the first eighth of a row.
    """
    rows = F.pad(weight, (0, 7 * weight.shape[1]))
    kept = packed(rows, weight_format=WeightFormat.INT4).blocks[0, :, 0]
    head = kept[:, :64].contiguous().view(torch.bfloat16).float().view(-1, 2, 16)
    words = kept[:, 64:].view(-1, 4, 16, 4).transpose(1, 2)
    codes = torch.stack([words & 15, words >> 4], -2).reshape(-1, 32)
    scales, offsets = (each.flatten()[: len(weight)] for each in head.unbind(1))
    return codes[: len(weight)].float(), scales, offsets


def multiplied(x: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor]) -> Tensor:
    (codes, scales), (weights, of_columns) = x, weight
    sums = torch.einsum("msk,nsk->mns", codes, weights).float() * of_columns * scales[:, None]
    return whole_sums(sums)


def added(x: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Multiply groups, and add those of an eighth one after the other."""
    (codes, scales), (weights, of_columns, offsets) = x, weight
    products = torch.einsum("msgk,nsgk->mnsg", codes, weights)
    totals = scales * codes.sum(-1).float()
    sums = torch.zeros(products.shape[:3])
    for group in range(products.shape[3]):
        both = of_columns[None, ..., group] * scales[:, None, :, group]
        sums = (products[..., group] * both.double() + sums.double()).float()
        shift = offsets[None, ..., group].double() * totals[:, None, :, group].double()
        sums = (shift + sums.double()).float()
    return whole_sums(sums)


def whole_sums(sums: Tensor) -> Tensor:
    while sums.shape[2] > 1:
        sums = sums[..., ::2] + sums[..., 1::2]
    return sums[..., 0]


@both
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TYPES)
def test_the_bits_are_the_described_ones(
    dtype: torch.dtype, shape: tuple[int, int], weight_format: WeightFormat
) -> None:
    weight, x = random_tensor(*shape, dtype=dtype), random_tensor(40, shape[1], dtype=dtype, seed=1)
    product = packed(weight, weight_format=weight_format)
    expected = described(x, weight, weight_format)
    for count in (1, 2, 7, 16, 17, 33, 40):
        assert torch.equal(
            product.multiply(x[:count], out_dtype=torch.float32), expected[:count]
        ), count
    assert torch.equal(product.multiply(x), expected.to(dtype))


@both
@pytest.mark.parametrize("dtype", TYPES)
def test_epilogues_are_as_for_other_products(
    dtype: torch.dtype, weight_format: WeightFormat
) -> None:
    weight, up, bias = (
        random_tensor(40, 96, dtype=dtype),
        random_tensor(40, 96, dtype=dtype, seed=1),
        random_tensor(40, dtype=dtype, seed=2),
    )
    x, residual = (
        random_tensor(9, 96, dtype=dtype, seed=3),
        random_tensor(9, 40, dtype=dtype, seed=4),
    )
    plain = described(x, weight, weight_format)
    product = packed(weight, bias, weight_format)
    assert torch.equal(
        product.multiply(x, residual=residual),
        (plain + bias.float() + residual.float()).to(dtype),
    )
    gated = product.multiply_gated(x, packed(up, weight_format=weight_format))
    torch.testing.assert_close(
        gated.float(),
        F.silu(plain + bias.float()) * described(x, up, weight_format),
        rtol=2e-2,
        atol=1e-5,
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
    product = PackedWeight(weight, None, Team(), weight_format=WeightFormat.INT8, row_scales=kept)
    own = F.pad(codes, (0, 6)).view(300, 8, 32).double(), scales[:, None].expand(-1, 8)
    expected = multiplied(coded(eighths(x)), own)
    expected[:, ::3] = described(x, weight, WeightFormat.INT8)[:, ::3]
    assert torch.equal(product.multiply(x, out_dtype=torch.float32), expected)


@both
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_has_the_same_bits_in_any_number_of_rows_and_threads(
    dtype: torch.dtype, num_threads: int, weight_format: WeightFormat
) -> None:
    weight, up = (
        packed(random_tensor(130, 250, dtype=dtype, seed=seed), weight_format=weight_format)
        for seed in range(2)
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


@both
@pytest.mark.parametrize("num_terms", [80, 100, 300])
@pytest.mark.parametrize("num_parts", [2, 4, 8])
@pytest.mark.parametrize("dtype", TYPES)
def test_parts_of_the_terms_add_up_to_the_whole_sum(
    dtype: torch.dtype, num_parts: int, num_terms: int, weight_format: WeightFormat
) -> None:
    """80 terms: eighths of 10 are no whole words of four codes. 100: the last eighth has 2 of
    14. 300: eighths of 38 are more than one group."""
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
            first_term=each * index,
            weight_format=weight_format,
        ).multiply(part, out_dtype=torch.float32)
        for index, (part, columns) in enumerate(pieces)
    ]
    while len(sums) > 1:
        sums = [first + second for first, second in zip(sums[::2], sums[1::2], strict=True)]
    whole = packed(weight, weight_format=weight_format)
    assert torch.equal(sums[0], whole.multiply(x, out_dtype=torch.float32))


@both
@pytest.mark.parametrize("dtype", TYPES)
def test_nan_stays_in_its_row_and_column(dtype: torch.dtype, weight_format: WeightFormat) -> None:
    weight, x = random_tensor(40, 24, dtype=dtype), random_tensor(13, 24, dtype=dtype, seed=1)
    expected = packed(weight, weight_format=weight_format).multiply(x)
    x[4, 2], x[5, 3], weight[17, 3] = float("nan"), float("-inf"), float("inf")
    result = packed(weight, weight_format=weight_format).multiply(x)
    assert result[4:6].isnan().all()
    assert result[:, 17].isnan().all()
    others = torch.ones(13, 40, dtype=torch.bool)
    others[4:6], others[:, 17] = False, False
    assert torch.equal(result[others], expected[others])


@both
@pytest.mark.parametrize("dtype", TYPES)
def test_the_least_and_the_highest_magnitudes(
    dtype: torch.dtype, weight_format: WeightFormat
) -> None:
    """An eighth of zeros, or of hardly more, is 0; one of the largest numbers is not infinite, nor
    the sum of 32 of them."""
    weight, x = random_tensor(16, 16, dtype=dtype), torch.zeros(3, 16, dtype=dtype)
    x[1], x[2] = 1e-38, 3e38 if weight_format is WeightFormat.INT8 else 1e37
    product = packed(weight, weight_format=weight_format)
    assert torch.equal(product.multiply(x[:2]), torch.zeros(2, 16, dtype=dtype))
    small = packed(weight * 2.0**-20, weight_format=weight_format)
    assert small.multiply(x[2:]).isfinite().all()
    large = packed(weight * 2.0**100, weight_format=weight_format)
    assert large.multiply(x.fill_(1.0)).isfinite().all()


@both
def test_empty_and_mismatched_operands(weight_format: WeightFormat) -> None:
    product = packed(random_tensor(24, 16), weight_format=weight_format)
    assert product.multiply(random_tensor(0, 16)).shape == (0, 24)
    without = packed(random_tensor(0, 16), weight_format=weight_format)
    assert without.multiply(random_tensor(3, 16)).shape == (3, 0)
    with pytest.raises(InternalError, match="beside up"):
        product.multiply_gated(
            random_tensor(2, 16), PackedWeight(random_tensor(24, 16), None, Team())
        )
    with pytest.raises(InternalError, match=f"rows of weights in {weight_format}"):
        product.rows(torch.tensor([1]))


@pytest.mark.parametrize(
    ("weight_format", "num_bytes"),
    [(WeightFormat.INT8, 1024 + 8 * 4), (WeightFormat.INT4, 1024 // 2 + 32 * 4)],
)
def test_the_bytes_of_a_row(weight_format: WeightFormat, num_bytes: int) -> None:
    """A byte of each weight and four of each eighth, or half a byte and four of each group."""
    product = packed(random_tensor(512, 1024, dtype=torch.bfloat16), weight_format=weight_format)
    scales = 0 if product.scales is None else product.scales.nbytes
    assert product.blocks.nbytes + scales == 512 * num_bytes
    assert kept_bytes((512, 1024), torch.bfloat16, weight_format) == 512 * num_bytes


KINDS = [gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q4_1]


def restored(values: Tensor, kind: gguf.GGMLQuantizationType) -> Tensor:
    """Return values as llama.cpp stores them."""
    return torch.from_numpy(gguf.dequantize(gguf.quantize(values.numpy(), kind), kind))


@pytest.mark.parametrize("num_terms", [32, 20, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_a_file_in_four_bits_are_kept(
    kind: gguf.GGMLQuantizationType, num_terms: int
) -> None:
    """Also of parts of its groups, which may not have all codes."""
    values = torch.randn(1600, 32, generator=torch.Generator().manual_seed(3))
    stored = restored(values, kind)[:, :num_terms].bfloat16()
    codes, scales, offsets = kept_codes(stored)
    found = (codes * scales[:, None] + offsets[:, None])[:, :num_terms]
    step = restored(values, kind).diff(dim=1).abs()
    least = step.masked_fill(step < 1e-3, torch.inf).amin(1)  # the distance of two codes, or more
    errors = (found - stored).abs().amax(1)
    assert (errors < 0.15 * least).all()


@pytest.mark.parametrize("group_terms", [64, 128])
def test_so_are_those_of_longer_groups(group_terms: int) -> None:
    """Of which 32 terms may have a few of the codes only."""
    generator = torch.Generator().manual_seed(5)
    scales = torch.rand(400, 1, generator=generator) * 0.01 + 0.001
    codes = torch.randn(400, group_terms, generator=generator).mul_(3).round_().clamp_(-8, 7)
    stored = (codes * scales).bfloat16().view(-1, 32)
    kept, own_scales, offsets = kept_codes(stored)
    found = kept * own_scales[:, None] + offsets[:, None]
    steps = scales.repeat(1, group_terms // 32).flatten()
    assert ((found - stored).abs().amax(1) < 0.15 * steps).all()


def test_errors_of_four_bits_are_near_the_least_ones() -> None:
    """Beside a search of 900 scales and offsets for each group, and the rules of llama.cpp."""
    values = torch.randn(1600, 32, generator=torch.Generator().manual_seed(4))
    codes, scales, offsets = kept_codes(values)
    assert (codes.min().item(), codes.max().item()) == (0, 15)
    found = (values - codes * scales[:, None] - offsets[:, None]).square().sum(-1)
    least = torch.full_like(found, torch.inf)
    most, lowest = values.amax(-1, keepdim=True), values.amin(-1, keepdim=True)
    for below in torch.linspace(-0.02, 0.15, 30).tolist():
        for above in torch.linspace(-0.02, 0.15, 30).tolist():
            start = lowest + below * (most - lowest)
            scale = (most - lowest) * (1 - below - above) / 15
            nearest = ((values - start) / scale).round().clamp(0, 15) * scale + start
            least = least.minimum((values - nearest).square().sum(-1))
    assert found.mean() < 1.04 * least.mean()
    for kind, ratio in zip(KINDS, (0.68, 0.82), strict=True):
        simple = restored(values, kind)
        assert found.mean() < ratio * (values - simple).square().sum(-1).mean()


@pytest.mark.parametrize(
    ("name", "features"),
    [
        ("x86-64", "+sse4.2,+fma,+avx"),
        ("haswell", "+avx2,+fma"),
        ("icelake-server", "+avx512f,+avx512bw,+avx512vl,+avx512vnni,+avx2,+fma"),
    ],
    ids=["avx", "avx2", "avx512-vnni"],
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
    assert done.stdout.split() == ["True"] * 4


PROGRAM = """
import torch
from tests.engine.kernels.test_coded_weights import FORMATS, described, packed
torch.manual_seed(0)
weight, x = torch.randn(70, 300).bfloat16(), torch.randn(37, 300).bfloat16()
for each in FORMATS:
    product = packed(weight, weight_format=each)
    print(torch.equal(product.multiply(x, out_dtype=torch.float32), described(x, weight, each)))
    print(torch.equal(product.multiply_gated(x, product)[3:4], product.multiply_gated(x[3:4], product)))
"""
