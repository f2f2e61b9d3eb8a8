"""Linear layers over given weights. bf16 weights are packed once, because packing on every call halves the speed."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.core.numerics import Numerics, padded_rows, silu

_MIN_PACKED_ROWS = 5  # one to four rows take a fifth to a half longer than five, and one row alone may change bits
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
        on_host = weight.device.type == "cpu"  # a device has its library's product, plain
        self._exact = on_host and numerics is Numerics.EXACT
        self._packed = on_host and weight.dtype is torch.bfloat16 and _packs()
        self._weight = _packed(weight) if self._packed else _aligned(weight)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, in] in the weight's dtype. Returns [T, out]."""
        if self._packed:
            return self._multiply_packed(x, "none")
        num_rows = x.shape[0]
        padded = _with_rows(x, padded_rows(num_rows, self.dtype)) if self._exact else x
        return F.linear(padded, self._weight, self._bias)[:num_rows]

    def silu(self, x: Tensor) -> Tensor:
        """silu(y), where the weight is packed before y is rounded and without another pass over it."""
        return self._multiply_packed(x, "swish") if self._packed else silu(self(x))

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        """y * factor [T, out], likewise."""
        num_rows = x.shape[0]
        if not self._packed or not num_rows:
            return self(x) * factor
        padded, factors = (_with_rows(rows, max(num_rows, _MIN_PACKED_ROWS)) for rows in (x, factor))
        result: Tensor = torch.ops.mkldnn._linear_pointwise.binary(  # noqa: SLF001
            padded, factors, self._weight, self._bias, "mul")
        return result[:num_rows]

    def _multiply_packed(self, x: Tensor, then: str) -> Tensor:
        num_rows = x.shape[0]
        if not num_rows:
            return x.new_empty(0, self.out_features)
        padded = _with_rows(x, max(num_rows, _MIN_PACKED_ROWS))
        result: Tensor = torch.ops.mkldnn._linear_pointwise(  # noqa: SLF001
            padded, self._weight, self._bias, then, [], "")
        return result[:num_rows]


def _with_rows(x: Tensor, num_rows: int) -> Tensor:
    """x [T, n] with rows of zeros behind it where T is smaller than `num_rows`."""
    return F.pad(x, (0, 0, 0, num_rows - len(x))) if len(x) < num_rows else x


def _packs() -> bool:
    """Whether oneDNN is here and multiplies in bf16, which it does not on a CPU that has AVX2 alone."""
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported()  # noqa: SLF001


def _packed(weight: Tensor) -> Tensor:
    result: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)  # noqa: SLF001
    return result


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy in aligned memory of its own if it is a view into something else."""
    if tensor.device.type != "cpu":
        return tensor.contiguous()
    owns_memory = tensor.untyped_storage().nbytes() == tensor.nbytes
    if owns_memory and tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT_BYTES == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
