"""Gates and gated norms against their formulas in fp64, and each element's bits with any
neighbors."""

import pytest
import torch
from torch import Tensor

from engine.kernels.host.codegen.compiled import Team
from engine.kernels.host.recurrent.gates import delta_gates, gate_heads, gated_norm

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def wide_values(*shape: int) -> Tensor:
    """Return values of all magnitudes that a product may have."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator) * 10.0 ** (
        torch.rand(shape, generator=generator) * 5 - 3
    )


def close(actual: Tensor, expected: Tensor, *, ulps: float = 8) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=ulps * 2.0**-23, atol=1e-38)


@DTYPES
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "width"), [(1, 1, 1), (7, 4, 1), (33, 3, 16), (0, 2, 1)]
)
def test_decays_and_strengths(
    dtype: torch.dtype, num_tokens: int, num_heads: int, width: int
) -> None:
    together = wide_values(num_tokens, num_heads * (width + 1) + 3).to(dtype)
    step, write = together[:, 1 : 1 + num_heads * width], together[:, -num_heads:]
    rates, offsets = -wide_values(num_heads).abs(), wide_values(num_heads * width)
    decay, strength = delta_gates(step, write, rates, offsets, Team())
    sums = (step.float() + offsets).double()
    softplus = sums.clamp(min=0) + torch.log1p(torch.exp(-sums.abs()))
    close(decay, rates.double().repeat_interleave(width) * softplus)
    close(
        strength, 1 / (1 + torch.exp(-write.double())), ulps=64
    )  # e^x of an error in x, which is large
    for token in range(num_tokens):
        alone = delta_gates(
            step[token : token + 1], write[token : token + 1], rates, offsets, Team()
        )
        assert torch.equal(alone[0][0], decay[token])
        assert torch.equal(alone[1][0], strength[token])


def test_the_ends_of_softplus_and_nan() -> None:
    step = torch.tensor([[float("nan"), float("inf"), -float("inf"), 100.0, -200.0, 0.0]])
    decay, strength = delta_gates(step, step, torch.ones(6), torch.zeros(6), Team())
    assert decay[0, 0].isnan()
    assert decay[0, 1:5].tolist() == [float("inf"), 0.0, 100.0, 0.0]
    assert decay[0, 5].item() == pytest.approx(0.6931472, rel=1e-7)
    assert strength[0, 0].isnan()
    assert strength[0, 1:4].tolist() == [1.0, 0.0, 1.0]


@DTYPES
@pytest.mark.parametrize("is_silu", [True, False])
@pytest.mark.parametrize(("num_tokens", "num_heads", "width"), [(1, 1, 1), (5, 3, 24), (9, 2, 130)])
def test_gated_norms(
    dtype: torch.dtype, num_tokens: int, num_heads: int, width: int, *, is_silu: bool
) -> None:
    x, weight = wide_values(num_tokens, num_heads, width), wide_values(width)
    gate = (
        torch.randn(num_tokens, num_heads * width + 5)
        .to(dtype)[:, 5:]
        .view(num_tokens, num_heads, width)
    )
    out = gated_norm(x, gate, weight, 1e-6, Team(), is_silu=is_silu)
    wide, opened = x.double(), gate.double()
    act = torch.sigmoid(opened) * (opened if is_silu else 1)
    expected = weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)) * act
    torch.testing.assert_close(
        out.double(), expected, rtol=2.0 ** (-8 if dtype is torch.bfloat16 else -20), atol=1e-38
    )
    for token in range(num_tokens):
        assert torch.equal(
            gated_norm(
                x[token : token + 1], gate[token : token + 1], weight, 1e-6, Team(), is_silu=is_silu
            )[0],
            out[token],
        )


@DTYPES
def test_gated_heads_are_rounded_as_torch_rounds_them(dtype: torch.dtype) -> None:
    x, gate = torch.randn(6, 40).to(dtype), torch.randn(6, 90).to(dtype)[:, 50:]
    out = gate_heads(x, gate, Team())
    expected = x.double() * torch.sigmoid(gate.double()).to(dtype).double()
    torch.testing.assert_close(
        out.double(), expected, rtol=2.0 ** (-7 if dtype is torch.bfloat16 else -20), atol=0.0
    )
