"""How layers compute: on which device, how strictly a row's bits are independent of what it travels
with, and what keeps them so.

Batches are made and planned on the host: their tables, slots and lengths stay there, whatever the
device. Weights, caches and what layers compute lie on the stage's device. Ids and positions cross
where a layer first reads them, hidden states at the stage's edge.

torch computes fp32 `silu`, `sigmoid`, `softplus` and `pow` (and bf16 `rsqrt`) with two codes:
vectors for most of a tensor and scalars for its tail, or for the tail of each thread's share. The
two differ in the last bit, so a value changes with the length of its tensor. `exp`, `log1p`,
`tanh`, `sin`, `cos`, fp32 `rsqrt` and plain arithmetic do not (measured, x86, 1 to 4 threads). The
activations here are composed of functions that have one code for all of a tensor.
"""

import math
from enum import StrEnum

import torch
import torch.nn.functional as F
from torch import Tensor

HOST = torch.device("cpu")


class Numerics(StrEnum):
    """`exact`: a row's result has the same bits in any batch, chunking, padding and pipeline split.

    `fast` may choose another order of operations where that is quicker; results then agree to
    rounding only.
    """

    EXACT = "exact"
    FAST = "fast"


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x) in fp32, returned in x's dtype; composed of functions that have one code for
    all of a tensor."""
    if x.device.type != "cpu":
        return F.silu(x)  # one code for every element
    wide = x.float()
    return (wide / (-wide).exp_().add_(1.0)).to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    """x * P(normal <= x) in fp32 by the formula with tanh (Hendrycks and Gimpel 2016), returned in
    x's dtype."""
    if x.device.type != "cpu":
        return F.gelu(x, approximate="tanh")
    wide = x.float()
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    return (0.5 * wide * (1.0 + inner.tanh())).to(x.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """In fp32, returned in x's dtype."""
    return (1.0 / (-x.float()).exp_().add_(1.0)).to(x.dtype)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), x: fp32. Above 20 it is x to the last bit."""
    return torch.where(x > 20.0, x, torch.log1p(torch.exp(x.clamp(max=20.0))))


def use_in_this_thread(device: torch.device) -> None:
    """Launch this thread's kernels on `device`. The current device belongs to the thread, and
    libraries that launch kernels themselves ask for it."""
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)  # it refuses a device without an index
