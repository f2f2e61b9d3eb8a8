"""Activations whose bits do not depend on how many rows travel together, beside `engine.core.numerics.silu`: composed
of functions that have one code for all of a tensor."""

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """In fp32, returned in x's dtype."""
    return (1.0 / (-x.float()).exp_().add_(1.0)).to(x.dtype)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), x: fp32. Above 20 it is x to the last bit."""
    return torch.where(x > 20.0, x, torch.log1p(torch.exp(x.clamp(max=20.0))))
