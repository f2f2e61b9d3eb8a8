"""The memory of weights in the formats in which projections keep them."""

import math

import torch

from engine.core.numerics import WeightFormat
from engine.kernels.host.linear import int4, int8


def kept_bytes(
    shape: tuple[int, ...], dtype: torch.dtype, weight_format: WeightFormat = WeightFormat.MODEL
) -> int:
    """Return the bytes of a tensor of a model in `dtype`; matrices are in `weight_format`."""
    if len(shape) < 2 or not weight_format.is_coded:
        return math.prod(shape) * dtype.itemsize
    row_bytes = int4.row_bytes if weight_format is WeightFormat.INT4 else int8.row_bytes
    return math.prod(shape[:-1]) * row_bytes(shape[-1])
