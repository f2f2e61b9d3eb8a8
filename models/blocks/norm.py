"""Norms over the last axis, mostly root-mean-square norms. Sums are always fp32."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.core.numerics import sigmoid, silu
from engine.kernels.host.codegen.compiled import Team, dense_tokens, has_kernels
from engine.kernels.host.recurrent.gates import gated_norm
from engine.kernels.host.tokens.norm_rope import add_and_norm, norm_and_rotate, rms_norm
from models.blocks.rotary import RotaryTable
from models.blocks.weights import Weights


@dataclass(frozen=True)
class NormSpec:
    """A root-mean-square norm.

    `zero_centred` norms multiply by (1 + w), others by w. Norms with `zero_centred` or
    `rounds_last` multiply in fp32 and cast last; others cast first. Without `has_weights` w is 1
    and is not in the files.
    """

    eps: float
    zero_centred: bool = False
    rounds_last: bool = False
    has_weights: bool = True

    def build(self, weights: Weights, name: str, size: int) -> "RmsNorm":
        return RmsNorm(weight=weights.tensor(f"{name}.weight", size), spec=self)


class RmsNorm:
    """A root-mean-square norm over the last axis of x [T, D] or [T, heads, D]."""

    def __init__(self, *, weight: Tensor, spec: NormSpec) -> None:
        self._spec = spec
        self._is_wide = spec.zero_centred or spec.rounds_last
        wide = weight.float() if self._is_wide else weight
        self._weight = (1.0 + wide if spec.zero_centred else wide).contiguous()
        self._team = Team()

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of x, in its shape and dtype."""
        if x.device.type != "cpu":
            return self.fused(x)
        if has_kernels(x.dtype, self._weight.dtype):
            return rms_norm(
                dense_tokens(x),
                self._weight,
                self._spec.eps,
                self._team,
                rounds_first=not self._is_wide,
            )
        scaled = x.to(torch.float32, copy=True)
        scaled *= _to_unit(scaled, self._spec.eps)
        if self._is_wide:
            return scaled.mul_(self._weight).to(x.dtype)
        return scaled.to(x.dtype).mul_(self._weight)

    def forward_rotated(self, x: Tensor, table: RotaryTable) -> Tensor:
        """Return `forward` of x [T, heads, D] with its halves rotated.

        It takes one pass over the tokens if a kernel supports it.
        """
        if (
            x.device.type != "cpu"
            or not has_kernels(x.dtype, self._weight.dtype)
            or table.cos.dtype != x.dtype
        ):
            return table.rotate_halves(self.forward(x))
        return norm_and_rotate(
            dense_tokens(x),
            self._weight,
            self._spec.eps,
            table.cos.contiguous(),
            table.sin.contiguous(),
            self._team,
            rounds_first=not self._is_wide,
        )

    def add_and_forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + other, [T, D], and `forward` of the sum.

        It takes one pass over the tokens if a kernel supports it.
        """
        if x.device.type != "cpu" or not (
            x.dtype == other.dtype and has_kernels(x.dtype, self._weight.dtype)
        ):
            total = x + other
            return total, self.forward(total)
        return add_and_norm(
            dense_tokens(x),
            dense_tokens(other),
            self._weight,
            self._spec.eps,
            self._team,
            rounds_first=not self._is_wide,
        )

    def fused(self, x: Tensor) -> Tensor:
        """Return `forward` up to rounding, in one kernel if the device has it.

        A step of few rows mostly waits for kernels.
        """
        # A weight of two dimensions has one row per head.
        wide = x.float() if self._is_wide else x
        own = self._weight.dim() > 1
        normed = F.rms_norm(wide, x.shape[-1:], None if own else self._weight, self._spec.eps)
        return (normed * self._weight if own else normed).to(x.dtype)


class GatedRmsNorm:
    """The output norm w * rms(x) * act(gate) of recurrent layers.

    It is over each head's values, in fp32. act is silu or sigmoid.
    """

    def __init__(self, *, weight: Tensor, eps: float, is_silu: bool = True) -> None:
        self._weight, self._eps, self._is_silu, self._team = (
            weight.float().contiguous(),
            eps,
            is_silu,
            Team(),
        )

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return the gated norm in the gate's dtype.

        `x` is [T, heads, head_dim] fp32; `gate` has the same shape in the model's dtype.
        """
        if x.device.type == "cpu" and has_kernels(gate.dtype):
            return gated_norm(
                x.contiguous(),
                dense_tokens(gate),
                self._weight,
                self._eps,
                self._team,
                is_silu=self._is_silu,
            )
        act = silu(gate.float()) if self._is_silu else sigmoid(gate.float())
        return (self._weight * (x * _to_unit(x, self._eps)) * act).to(gate.dtype)


def _to_unit(x: Tensor, eps: float) -> Tensor:
    """Return the factor per row that scales x to a root mean square of 1."""
    return (x * x).mean(-1, keepdim=True).add_(eps).rsqrt_()


class LayerNorm:
    """A norm to zero mean and unit variance over the last axis in fp32, then weight and bias."""

    def __init__(self, *, weight: Tensor, bias: Tensor, eps: float) -> None:
        self._weight = weight.float()
        self._bias = bias.float()
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of x, in its shape and dtype."""
        centred = x.float() - x.float().mean(-1, keepdim=True)
        return (centred * _to_unit(centred, self._eps) * self._weight + self._bias).to(x.dtype)
