"""Root-mean-square norms. Sums are always fp32."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.numerics import silu
from models.weights import Weights


@dataclass(frozen=True)
class NormSpec:
    """`zero_centred` norms multiply by (1 + w) in fp32 and cast last; the others cast first and multiply by w."""

    eps: float
    zero_centred: bool = False

    def build(self, weights: Weights, name: str, size: int) -> "RmsNorm":
        return RmsNorm(weight=weights.tensor(f"{name}.weight", size), spec=self)


class RmsNorm:
    """Over the last axis."""

    def __init__(self, *, weight: Tensor, spec: NormSpec) -> None:
        self._spec = spec
        self._weight = 1.0 + weight.float() if spec.zero_centred else weight

    def forward(self, x: Tensor) -> Tensor:
        scaled = x.to(torch.float32, copy=True)
        scaled *= _to_unit(scaled, self._spec.eps)
        if self._spec.zero_centred:
            return scaled.mul_(self._weight).to(x.dtype)
        return scaled.to(x.dtype).mul_(self._weight)


class GatedRmsNorm:
    """w * rms(x) * silu(gate), the output norm of GatedDeltaNet: over each head's values, in fp32."""

    def __init__(self, *, weight: Tensor, eps: float) -> None:
        self._weight = weight.float()
        self._eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x: [T, heads, head_dim] fp32; gate: same shape, model dtype. Returns fp32."""
        return self._weight * (x * _to_unit(x, self._eps)) * silu(gate.float())


def _to_unit(x: Tensor, eps: float) -> Tensor:
    """The factor that brings x to unit length, per row."""
    return (x * x).mean(-1, keepdim=True).add_(eps).rsqrt_()


class LayerNorm:
    """Zero mean, unit variance over the last axis in fp32, then weight and bias."""

    def __init__(self, *, weight: Tensor, bias: Tensor, eps: float) -> None:
        self._weight = weight.float()
        self._bias = bias.float()
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        centred = x.float() - x.float().mean(-1, keepdim=True)
        return (centred * _to_unit(centred, self._eps) * self._weight + self._bias).to(x.dtype)
