"""Numerics of layers: device, batch invariance, and activations with reproducible bits.

Batches are built and planned on the host. Their tables, slots and lengths stay there, whatever the
device. Weights, caches and layer inputs are on the stage's device. Ids and positions move to the
device when a layer first reads them, and hidden states at the edge of the stage.

torch computes fp32 `silu`, `sigmoid`, `softplus` and `pow` (and bf16 `rsqrt`) with two
implementations: vector code for most of a tensor, and scalar code for its tail or for the tail of
each thread's share. The two differ in the last bit, so a value depends on the length of its tensor.
`exp`, `log1p`, `tanh`, `sin`, `cos`, fp32 `rsqrt` and plain arithmetic do not (measured on x86, 1
to 4 threads). The activations here are composed of functions that have one implementation for the
whole tensor.
"""

import math
from enum import StrEnum

import torch
import torch.nn.functional as F
from torch import Tensor

HOST = torch.device("cpu")


class Numerics(StrEnum):
    """The reproducibility of results.

    With `exact` a row's result has the same bits in any batch, chunking, padding and pipeline
    split. `fast` may choose a faster order of operations; results then agree to rounding only.
    """

    EXACT = "exact"
    FAST = "fast"


class WeightFormat(StrEnum):
    """The format in which projections keep their weights on the host."""

    MODEL = "model"  # the model's dtype
    INT8 = "int8"  # codes of eight bits
    INT4 = "int4"  # codes of four bits

    @property
    def is_coded(self) -> bool:
        """Return whether weights are kept as integer codes with scales."""
        return self is not WeightFormat.MODEL

    @property
    def of_head(self) -> "WeightFormat":
        """Return the format of a projection to the vocabulary.

        Errors in logits cost more than others, so it has eight bits where others have four.
        """
        return WeightFormat.INT8 if self is WeightFormat.INT4 else self


def silu(x: Tensor) -> Tensor:
    """Compute x * sigmoid(x) in fp32 and return it in x's dtype."""
    if x.device.type != "cpu":
        return F.silu(x)  # one implementation for every element
    wide = x.float()
    return (wide / (-wide).exp_().add_(1.0)).to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    """Compute x * P(normal <= x) in fp32 and return it in x's dtype.

    The formula is the tanh approximation (Hendrycks and Gimpel 2016).
    """
    if x.device.type != "cpu":
        return F.gelu(x, approximate="tanh")
    wide = x.float()
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    return (0.5 * wide * (1.0 + inner.tanh())).to(x.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """Compute the sigmoid in fp32 and return it in x's dtype."""
    return (1.0 / (-x.float()).exp_().add_(1.0)).to(x.dtype)


def softplus(x: Tensor) -> Tensor:
    """Compute log(1 + e^x) for fp32 x; above 20 it equals x to the last bit."""
    return torch.where(x > 20.0, x, torch.log1p(torch.exp(x.clamp(max=20.0))))


def use_in_this_thread(device: torch.device) -> None:
    """Launch this thread's kernels on `device`.

    The current device is a property of the thread. Libraries that launch kernels themselves query
    it.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)  # set_device rejects a device without an index
