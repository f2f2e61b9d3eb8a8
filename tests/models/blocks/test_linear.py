"""Linear layers against a plain product, and the bits of their rows under any row count."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.blocks.linear import GatedLinear, GroupedLinear, HeadwiseLinear, Linear

DTYPES = [torch.float32, torch.bfloat16, torch.float16]  # of the last, plain torch


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("num_rows", [0, 1, 7])
def test_product(num_rows: int, biased: bool, dtype: torch.dtype) -> None:  # noqa: FBT001
    weight, bias, x = (
        draw(24, 16, dtype=dtype),
        draw(24, dtype=dtype, seed=1),
        draw(num_rows, 16, dtype=dtype, seed=2),
    )
    linear = Linear(weight, biases=[bias] if biased else [])
    expected = F.linear(x.double(), weight.double(), bias.double() if biased else None)
    bound = 1e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(linear(x).double(), expected, rtol=bound, atol=bound)
    assert linear(x).dtype is dtype
    assert (linear.in_features, linear.out_features) == (16, 24)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_weights_give_their_outputs_one_after_the_other(dtype: torch.dtype) -> None:
    weights = [draw(n, 16, dtype=dtype, seed=n) for n in (8, 4, 12)]
    biases = [draw(n, dtype=dtype, seed=n + 50) for n in (8, 4, 12)]
    x = draw(5, 16, dtype=dtype, seed=3)
    parts = torch.split(Linear(*weights, biases=biases)(x), [8, 4, 12], -1)
    for part, weight, bias in zip(parts, weights, biases, strict=True):
        assert torch.equal(part, Linear(weight, biases=[bias])(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 7])
def test_gated_product(num_rows: int, dtype: torch.dtype) -> None:
    gate, up, x = (
        draw(24, 16, dtype=dtype),
        draw(24, 16, dtype=dtype, seed=1),
        draw(num_rows, 16, dtype=dtype, seed=2),
    )
    result = GatedLinear(Linear(gate), Linear(up))(x)
    expected = F.silu(F.linear(x.double(), gate.double())) * F.linear(x.double(), up.double())
    bound = 1e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(result.double(), expected, rtol=bound, atol=bound)
    assert result.dtype is dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 7])
def test_a_matrix_for_each_head(num_rows: int, dtype: torch.dtype) -> None:
    weight, x = draw(3, 10, 6, dtype=dtype), draw(num_rows, 3, 6, dtype=dtype, seed=1)
    result = HeadwiseLinear(weight)(x)
    bound = 1e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(
        result.double(),
        torch.einsum("thi,hoi->tho", x.double(), weight.double()),
        rtol=bound,
        atol=bound,
    )
    assert (result.shape, result.dtype) == ((num_rows, 3, 10), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 192), (704, 256), (300, 3072)])
def test_a_row_has_the_same_bits_in_any_number_of_rows(
    threads: int, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    weight = draw(*shape, dtype=dtype)
    linear, gated = Linear(weight), GatedLinear(Linear(weight), Linear(weight.flip(0)))
    heads = HeadwiseLinear(weight.view(4, shape[0] // 4, shape[1]))
    x = draw(40, shape[1], dtype=dtype, seed=1)
    expected = linear(x), gated(x), heads(x[:, None].expand(-1, 4, -1))
    for count in (*range(1, 9), 15, 16, 17, 25, 33):
        rows = slice(7, 7 + count)
        results = linear(x[rows]), gated(x[rows]), heads(x[rows, None].expand(-1, 4, -1))
        assert all(
            torch.equal(part, whole[rows]) for part, whole in zip(results, expected, strict=True)
        ), count


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_layout_of_the_weight_does_not_change_results(dtype: torch.dtype) -> None:
    weight, x = draw(96, 64, dtype=dtype), draw(9, 64, dtype=dtype, seed=1)
    expected = Linear(weight)(x)
    for shift in range(1, 16):
        moved = torch.empty(weight.numel() + 16, dtype=dtype)[shift : shift + weight.numel()].view(
            96, 64
        )
        moved.copy_(weight)
        assert torch.equal(Linear(moved)(x), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_terms", [5, 6, 64, 256])
def test_rows_of_the_weight_come_back(dtype: torch.dtype, num_terms: int) -> None:
    weight, indices = draw(37, num_terms, dtype=dtype), torch.tensor([0, 36, 16, 15, 16])
    assert torch.equal(Linear(weight).weight_rows(indices), weight[indices])
    assert Linear(weight).weight_rows(indices[:0]).shape == (0, num_terms)


def test_biases_must_match_the_weights() -> None:
    with pytest.raises(ValueError, match="2 fused weights"):
        Linear(torch.zeros(2, 2), torch.zeros(2, 2), biases=[torch.zeros(2)])


def test_logits_are_not_rounded_to_the_weights_type() -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(70, 96, generator=generator).bfloat16()
    x = torch.randn(5, 96, generator=generator).bfloat16()
    logits, exact = Linear(weight).logits(x), x.double() @ weight.double().T
    assert logits.dtype is torch.float32
    assert torch.allclose(logits.double(), exact, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(exact.bfloat16().double(), exact, rtol=1e-4), (
        "what is rounded is further away"
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", [(3, 0, 1, 40), (0, 0, 0, 1), (70, 1, 1, 1), (0, 0, 0, 0)])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_grouped_layers_give_each_row_the_bits_of_its_own_layer(
    threads: int,
    gated: bool,  # noqa: FBT001
    counts: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    weights = [
        [Linear(draw(35, 40, dtype=dtype, seed=2 * index + half)) for half in range(2)]
        for index in range(len(counts))
    ]
    layers: list[Linear | GatedLinear] = [
        GatedLinear(gate, up) if gated else gate for gate, up in weights
    ]
    x = draw(sum(counts), 40, dtype=dtype, seed=99)
    alone = [layer(part) for layer, part in zip(layers, torch.split(x, list(counts)), strict=True)]
    grouped = GroupedLinear(layers)(x, counts)
    assert torch.equal(grouped, torch.cat(alone))
    assert (grouped.shape, grouped.dtype) == ((sum(counts), 35), dtype)
