"""Activations whose bits do not depend on how many rows travel together.

The vectorised CPU kernels of sigmoid, silu and softplus finish the last few elements of a tensor with scalar code that
rounds differently, so an element's bits depend on where it lies. Where a row is a whole number of vectors, no row has
such a rest. Otherwise the functions are composed of `exp` and `log1p`, which have no scalar rest.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_VECTOR_ELEMENTS = 64  # two AVX-512 registers of bfloat16, the widest step of those kernels


def sigmoid(x: Tensor) -> Tensor:
    if x.shape[-1] % _VECTOR_ELEMENTS == 0:
        return torch.sigmoid(x)
    return (1.0 / (1.0 + torch.exp(-x.float()))).to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    if x.shape[-1] % _VECTOR_ELEMENTS == 0:
        return F.silu(x)
    wide = x.float()
    return (wide / (1.0 + torch.exp(-wide))).to(x.dtype)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), x: fp32. Above 20 it is x to the last bit."""
    return torch.where(x > 20.0, x, torch.log1p(torch.exp(x.clamp(max=20.0))))
