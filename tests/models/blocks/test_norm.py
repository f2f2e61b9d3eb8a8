"""The norm as a device runs it, against the one that is exact on the host."""

import pytest
import torch

from models.blocks.norm import NormSpec, RmsNorm


@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize("shape", [(96,), (3, 96)], ids=["one weight", "a weight per head"])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
def test_the_fused_norm_is_the_same_up_to_rounding(
    shape: tuple[int, ...], dtype: torch.dtype, rtol: float, *, zero_centred: bool
) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(size, generator=generator).to(dtype) for size in ((5, 3, 96), shape))
    norm = RmsNorm(weight=weight, spec=NormSpec(eps=1e-3, zero_centred=zero_centred))
    found = norm.fused(x)
    assert found.dtype is dtype
    torch.testing.assert_close(found, norm.forward(x), rtol=rtol, atol=1e-6)
