"""Linear layers over given weights. bf16 weights are packed once, because packing on every call halves the speed."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.numerics import Numerics, padded_rows

_ALIGNMENT_BYTES = 64  # two copies of one weight at different alignment give different bits


class Linear:
    """y = x W^T + b. `weight` is [out, in]; `bias` [out] or None.

    Several weights that share their input (q, k, v; gate, up) are fused by giving them all: their outputs follow each
    other in the last dimension.
    """

    def __init__(self, *weights: Tensor, biases: Sequence[Tensor] = (), numerics: Numerics = Numerics.EXACT) -> None:
        if biases and len(biases) != len(weights):
            raise ValueError(f"{len(weights)} fused weights need as many biases, got {len(biases)}")
        weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self._bias = None if not biases else _aligned(torch.cat(list(biases)))
        self._exact = numerics is Numerics.EXACT
        self._packed = weight.dtype is torch.bfloat16 and _has_onednn()
        self._weight = _packed(weight) if self._packed else _aligned(weight)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, in] in the weight's dtype. Returns [T, out]."""
        num_rows = x.shape[0]
        if num_rows == 0:
            return x.new_empty(0, self.out_features)
        missing = padded_rows(num_rows, self.dtype) - num_rows if self._exact else 0
        if missing:
            return self._multiply(F.pad(x, (0, 0, 0, missing)))[:num_rows]
        return self._multiply(x)

    def _multiply(self, x: Tensor) -> Tensor:
        if self._packed:
            return _packed_linear(x, self._weight, self._bias)
        return F.linear(x, self._weight, self._bias)


def _has_onednn() -> bool:
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def _packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # noqa: SLF001
    return result


def _packed(weight: Tensor) -> Tensor:
    result: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)  # noqa: SLF001
    return result


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy in aligned memory of its own if it is a view into something else."""
    owns_memory = tensor.untyped_storage().nbytes() == tensor.nbytes
    if owns_memory and tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT_BYTES == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
