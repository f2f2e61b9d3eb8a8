"""The product of the host: against double precision and its description in plain torch, and its
bits for any rows."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.core.layer_range import eighth
from engine.kernels.host.codegen.amx import has_tiles
from engine.kernels.host.codegen.compiled import Team
from engine.kernels.host.codegen.sum_tree import earlier_sums
from engine.kernels.host.codegen.vectors import has_pair_products
from engine.kernels.host.linear.packed_linear import PackedWeight, arithmetic_class
from engine.kernels.host.linear.packing import Segments, arranged, pack
from engine.kernels.host.tokens.row_ops import apart, rows_apart
from engine.kernels.plain_product import plain_product
from runtime.errors import InternalError

TYPES = [torch.bfloat16, torch.float32]
SHAPES = [
    (1, 1),
    (7, 3),
    (16, 16),
    (33, 17),
    (64, 8),
    (100, 1000),
    (130, 250),
    (300, 1024),
    (17, 2051),
]  # N, K
COUNTS = [*range(1, 28), 31, 48, 49, 95, 97, 150]


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed(weight: Tensor, bias: Tensor | None = None) -> PackedWeight:
    return PackedWeight(weight, bias, Team())


def near(actual: Tensor, expected: Tensor, num_terms: int) -> None:
    """Return a tolerance of one step of the result's type and of every sum's fp32."""
    bound = 2.0**-8 if actual.dtype is torch.bfloat16 else 2.0**-22
    torch.testing.assert_close(actual.double(), expected, rtol=bound, atol=2.0**-22 * num_terms)


@pytest.fixture(params=[1, 2, 3, 4])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TYPES)
def test_it_is_the_product(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight, bias = random_tensor(*shape, dtype=dtype), random_tensor(shape[0], dtype=dtype, seed=1)
    up, up_bias = (
        random_tensor(*shape, dtype=dtype, seed=2),
        random_tensor(shape[0], dtype=dtype, seed=3),
    )
    x, residual = (
        random_tensor(29, shape[1], dtype=dtype, seed=4),
        random_tensor(29, shape[0], dtype=dtype, seed=5),
    )
    plain = F.linear(x.double(), weight.double())
    near(packed(weight).multiply(x, out_dtype=torch.float32), plain, shape[1])
    near(packed(weight).multiply(x), plain, shape[1])
    near(
        packed(weight, bias).multiply(x, residual=residual),
        plain + bias.double() + residual.double(),
        shape[1],
    )
    gated = packed(weight, bias).multiply_gated(x, packed(up, up_bias))
    near(
        gated,
        F.silu(plain + bias.double()) * F.linear(x.double(), up.double(), up_bias.double()),
        20 * shape[1],
    )
    assert gated.dtype is packed(weight).multiply(x).dtype is dtype


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TYPES)
def test_the_order_of_sums_is_the_described_one(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight, x = random_tensor(*shape, dtype=dtype), random_tensor(7, shape[1], dtype=dtype, seed=1)
    by_tiles = dtype is torch.bfloat16 and has_tiles()
    described = plain_product(x, weight, by_tiles=by_tiles)
    assert torch.equal(packed(weight).multiply(x, out_dtype=torch.float32), described)


def test_partial_sums_of_segments_form_a_tree() -> None:
    places, after = ["", "", ""], []
    for segment in range(8):
        num_earlier, place = earlier_sums.py_func(segment)
        total = str(segment)
        for earlier in reversed(places[place : place + num_earlier]):
            total = f"({earlier}+{total})"
        places[place] = total
        after.append(places[0])
    assert [after[count - 1] for count in (1, 2, 4)] == ["0", "(0+1)", "((0+1)+(2+3))"]
    assert after[7] == "(((0+1)+(2+3))+((4+5)+(6+7)))"


@pytest.mark.parametrize("shape", [(7, 3), (130, 250), (700, 1024)])
@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_has_the_same_bits_in_any_number_of_rows_and_threads(
    threads: int, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    weight, up = (
        packed(random_tensor(*shape, dtype=dtype)),
        packed(random_tensor(*shape, dtype=dtype, seed=1)),
    )
    x, residual = (
        random_tensor(1000, shape[1], dtype=dtype, seed=2),
        random_tensor(1000, shape[0], dtype=dtype, seed=3),
    )
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    whole, gated = weight.multiply(x, residual=residual), weight.multiply_gated(x, up)
    torch.set_num_threads(before)
    assert torch.equal(weight.multiply(x, residual=residual), whole)
    for count in COUNTS:
        rows = slice(5, 5 + count)
        assert torch.equal(weight.multiply(x[rows], residual=residual[rows]), whole[rows]), count
        assert torch.equal(weight.multiply_gated(x[rows], up), gated[rows]), count


@pytest.mark.parametrize("dtype", TYPES)
def test_rows_and_residuals_may_be_parts_of_wider_ones(dtype: torch.dtype) -> None:
    weight = packed(random_tensor(40, 64, dtype=dtype))
    x, residual = (
        random_tensor(9, 200, dtype=dtype, seed=1),
        random_tensor(9, 50, dtype=dtype, seed=2),
    )
    expected = weight.multiply(x[:, 31:95].clone(), residual=residual[:, 3:43].clone())
    assert torch.equal(weight.multiply(x[:, 31:95], residual=residual[:, 3:43]), expected)
    turned, turned_residual = (
        x[:, 31:95].t().contiguous().t(),
        residual[:, 3:43].t().contiguous().t(),
    )
    assert torch.equal(weight.multiply(turned, residual=turned_residual), expected)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("num_terms", "num_columns"), [(63, 40), (64, 33)])
def test_only_the_operands_are_read(dtype: torch.dtype, num_terms: int, num_columns: int) -> None:
    """Every row of x and of the weight has NaN before and after it, and the result's memory is all
    NaN."""

    def among_nans(inside: Tensor) -> Tensor:
        wider = torch.full((len(inside) + 2, inside.shape[1] + 6), float("nan"), dtype=dtype)
        wider[1:-1, 2:-4] = inside
        return wider[1:-1, 2:-4]

    weight, x = (
        random_tensor(num_columns, num_terms, dtype=dtype),
        random_tensor(13, num_terms, dtype=dtype, seed=1),
    )
    expected = packed(weight).multiply(x)
    assert torch.equal(packed(among_nans(weight)).multiply(among_nans(x)), expected)


@pytest.mark.parametrize("dtype", TYPES)
def test_nan_stays_in_its_row_and_column(dtype: torch.dtype) -> None:
    weight, x = random_tensor(40, 24, dtype=dtype), random_tensor(13, 24, dtype=dtype, seed=1)
    expected = packed(weight).multiply(x)
    x[4], weight[17, 3] = float("nan"), float("inf")
    result = packed(weight).multiply(x)
    assert result[4].isnan().all()
    assert not result[:4, 17].isfinite().any()
    others = torch.ones(13, 40, dtype=torch.bool)
    others[4], others[:, 17] = False, False
    assert torch.equal(result[others], expected[others])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("heads", "num_columns", "num_terms"), [(1, 16, 16), (6, 24, 33), (3, 5, 8)]
)
def test_a_matrix_for_each_head(
    dtype: torch.dtype, heads: int, num_columns: int, num_terms: int
) -> None:
    weight, x = (
        random_tensor(heads, num_columns, num_terms, dtype=dtype),
        random_tensor(20, heads, num_terms + 3, dtype=dtype, seed=1),
    )
    x = x[:, :, 1:-2]
    result = packed(weight).multiply(x)
    for head in range(heads):
        alone = packed(weight[head].clone()).multiply(x[:, head].clone())
        assert torch.equal(result.view(20, heads, num_columns)[:, head], alone)


@pytest.mark.parametrize(
    ("first", "is_copied"), [(0, False), (1, True), (16, False), (63, False), (65, True)]
)
def test_strided_rows_have_the_bits_of_a_copy(first: int, is_copied: bool) -> None:  # noqa: FBT001
    """100 of 112 rows. Rows after a slice's last, up to a multiple of 16, are read with it: if the
    memory ends before them it is copied."""
    weight, rows = (
        packed(random_tensor(40, 256, dtype=torch.bfloat16)),
        random_tensor(100, 256, dtype=torch.bfloat16, seed=1),
    )
    lie_apart = rows_apart(100, 256, rows.dtype)
    lie_apart.as_strided((112 * lie_apart.stride(0),), (1,)).fill_(float("nan"))
    lie_apart.copy_(rows)
    part = lie_apart[first:]
    given = apart(part, Team())
    assert (given.data_ptr() != part.data_ptr()) == is_copied
    assert (
        given.stride(0) * given.itemsize // 64 % 2
        == apart(rows, Team()).stride(0) * given.itemsize // 64 % 2
        == 1
    )
    assert torch.equal(given, rows[first:])
    assert torch.equal(weight.multiply(part), weight.multiply(rows[first:].clone()))


@pytest.mark.parametrize("dtype", TYPES)
def test_nothing_to_multiply(dtype: torch.dtype) -> None:
    assert packed(random_tensor(24, 16, dtype=dtype)).multiply(
        random_tensor(0, 16, dtype=dtype)
    ).shape == (0, 24)
    assert packed(random_tensor(0, 16, dtype=dtype)).multiply(
        random_tensor(3, 16, dtype=dtype)
    ).shape == (3, 0)
    assert torch.equal(
        packed(torch.empty(3, 0, dtype=dtype)).multiply(torch.empty(2, 0, dtype=dtype)),
        torch.zeros(2, 3, dtype=dtype),
    )


def test_mismatched_operands_are_refused() -> None:
    weight = packed(random_tensor(24, 16))
    with pytest.raises(InternalError, match="15"):
        weight.multiply(random_tensor(2, 15))
    with pytest.raises(InternalError, match="bfloat16"):
        weight.multiply(random_tensor(2, 16).bfloat16())
    with pytest.raises(InternalError, match="beside up"):
        weight.multiply_gated(random_tensor(2, 16), packed(random_tensor(25, 16)))


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize(
    ("dtype", "num_terms"),
    [
        (torch.bfloat16, 7),
        (torch.bfloat16, 50),
        (torch.bfloat16, 64),
        (torch.float32, 7),
        (torch.float32, 21),
    ],
)
def test_packing(dtype: torch.dtype, num_terms: int, multiple: int) -> None:
    """Every value is where the segments' rule puts it, and all else is 0."""
    weight, segments = (
        random_tensor(2, 19, num_terms, dtype=dtype),
        Segments(num_terms, dtype, multiple),
    )
    blocks = pack(weight, segments, Team())
    pair = 2 if dtype is torch.bfloat16 else 1
    own = -(-num_terms // 16) * 2 // pair  # steps; a segment has pairs of terms in every type
    filled = -(-own // multiple) * multiple
    expected = torch.zeros(2, 2, 8 * filled, 16, pair, dtype=dtype)
    for n in range(19):
        for k in range(num_terms):
            segment, step = divmod(k // pair, own)
            expected[:, n // 16, segment * filled + step, n % 16, k % pair] = weight[:, n, k]
    assert torch.equal(blocks.view(expected.shape), expected)
    assert torch.equal(segments.restored(arranged(weight, segments, Team())), weight)
    kept = blocks.view(2, 2, 8 * filled, 16, pair).transpose(2, 3).reshape(2, 32, -1)[:, :19]
    assert torch.equal(arranged(weight, segments, Team()), kept)


@pytest.mark.parametrize("by_tiles", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, *TYPES])
def test_plain_product(dtype: torch.dtype, by_tiles: bool) -> None:  # noqa: FBT001
    weight, x = random_tensor(40, 777, dtype=dtype), random_tensor(30, 777, dtype=dtype, seed=1)
    result = plain_product(x, weight, by_tiles=by_tiles)
    near(result, F.linear(x.double(), weight.double()), 777)
    assert torch.equal(plain_product(x[11:12], weight, by_tiles=by_tiles), result[11:12])
    assert plain_product(x[:0], weight, by_tiles=by_tiles).shape == (0, 40)


@pytest.mark.long
@pytest.mark.parametrize(
    ("variables", "without", "types"),
    [
        (
            {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma"},
            "pairs",
            ["bfloat16", "float32"],
        ),
        (
            {"NUMBA_CPU_NAME": "skylake-avx512", "NUMBA_CPU_FEATURES": "+avx512f,+avx512bf16,+fma"},
            "widened",
            ["bfloat16"],
        ),
    ],
    ids=["avx2", "avx512-bf16"],
)
def test_classes_of_arithmetic(variables: dict[str, str], without: str, types: list[str]) -> None:
    """numba compiles for the CPU that its variables name. By pairs and by widened ones the bits are
    the same. With AVX-512 the products of fp32 are this machine's own, which the other tests
    hold."""
    if "avx512bf16" in variables["NUMBA_CPU_FEATURES"] and not (
        has_tiles() and has_pair_products()
    ):
        # this machine has no such instructions, or no others, and then all the other tests are of
        # these
        return
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *types],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    name, equal = done.stdout.split()
    assert name.split("-")[0].isdigit()
    assert name.split("-")[1] in {"pairs", "widened"} - {without}
    assert equal == "True"


PROGRAM = """
import sys
import torch
from engine.kernels.host.linear.packed_linear import PackedWeight, arithmetic_class
from engine.kernels.host.codegen.sum_tree import earlier_sums
from engine.kernels.host.codegen.compiled import Team
from engine.kernels.plain_product import plain_product
torch.manual_seed(0)
equal = True
for dtype in (getattr(torch, name) for name in sys.argv[1:]):
    w, x = torch.randn(70, 300).to(dtype), torch.randn(11, 300).to(dtype)
    packed = PackedWeight(w, None, Team())
    equal &= torch.equal(packed.multiply(x, out_dtype=torch.float32), plain_product(x, w))
    equal &= torch.equal(packed.multiply_gated(x, packed)[3:4], packed.multiply_gated(x[3:4], packed))
print(arithmetic_class(), equal)
"""


def test_this_machines_class_of_arithmetic() -> None:
    instructions = "tiles" if has_tiles() else "pairs" if has_pair_products() else "widened"
    assert arithmetic_class().endswith(f"-{instructions}")


@pytest.mark.parametrize("num_parts", [2, 4, 8])
@pytest.mark.parametrize("dtype", [*TYPES, torch.float16])
def test_parts_of_the_terms_add_up_to_the_whole_sum(dtype: torch.dtype, num_parts: int) -> None:
    """Processes with a part of K each add subtrees of the tree that one process adds."""
    for num_columns, num_terms in [(33, 64), (20, 768), (33, 100), (20, 777)]:
        weight, x = (
            random_tensor(num_columns, num_terms, dtype=dtype),
            random_tensor(40, num_terms, dtype=dtype, seed=1),
        )
        own, count = eighth(num_terms), 8 // num_parts
        pieces = list(
            zip(torch.split(x, own * count, 1), torch.split(weight, own * count, 1), strict=True)
        )
        if dtype is torch.float16:  # without a kernel
            whole = plain_product(x, weight)
            sums = [
                plain_product(part, columns, num_segments=count, segment_terms=own)
                for part, columns in pieces
            ]
        else:
            whole = packed(weight).multiply(x, out_dtype=torch.float32)
            sums = [
                PackedWeight(columns, None, Team(), num_segments=count, segment_terms=own).multiply(
                    part, out_dtype=torch.float32
                )
                for part, columns in pieces
            ]
        while len(sums) > 1:
            sums = [first + second for first, second in zip(sums[::2], sums[1::2], strict=True)]
        assert torch.equal(sums[0], whole), (num_columns, num_terms)
