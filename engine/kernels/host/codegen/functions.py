"""Functions of one fp32 number for kernels with STRICT numbers.

They are written out, so that every element of a tensor has the same operations, in a vector or
alone, on every CPU and with every C library.
"""

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from engine.kernels.host.codegen.compiled import STRICT_PART

# e^x is 0 below, infinite above
_LOWEST = np.float32(-104.0)
_HIGHEST = np.float32(89.0)
_LOG2_E = np.float32(1.44269504088896341)
# 1.5 * 2^23: adding it rounds to an integer, which is then in the lowest bits.
_ROUNDER = np.float32(12582912.0)
_ROUNDER_BITS = np.int32(0x4B400000)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
# Coefficients of (e^r - 1 - r) / r^2 for |r| <= ln(2) / 2: the polynomial of Cephes' expf.
_P0 = np.float32(1.9875691500e-4)
_P1 = np.float32(1.3981999507e-3)
_P2 = np.float32(8.3334519073e-3)
_P3 = np.float32(4.1665795894e-2)
_P4 = np.float32(1.6666665459e-1)
_P5 = np.float32(5.0000001201e-1)
_PI_HALVES = 2 / np.pi
# The first 33 bits of pi / 2: the product with an integer of 20 bits is exact.
_HALF_PI_HIGH = 1.57079632673412561417
_HALF_PI_LOW = 6.07710050650619224932e-11
# Taylor coefficients in double precision: for |r| <= pi / 4 the first omitted terms are below
# 2e-14.
_S3 = -1 / 6
_S5 = 1 / 120
_S7 = -1 / 5040
_S9 = 1 / 362880
_S11 = -1 / 39916800
_S13 = 1 / 6227020800
_C2 = -1 / 2
_C4 = 1 / 24
_C6 = -1 / 720
_C8 = 1 / 40320
_C10 = -1 / 3628800
_C12 = 1 / 479001600
_C14 = -1 / 87178291200
_ONE = np.float32(1.0)
_TWO = np.float32(2.0)
_A3 = np.float32(1 / 3)
_A5 = np.float32(1 / 5)
_A7 = np.float32(1 / 7)
_A9 = np.float32(1 / 9)
_A11 = np.float32(1 / 11)
_A13 = np.float32(1 / 13)


@intrinsic
def fma(typing, a, b, c):
    """Return a * b + c, rounded once; all fp32."""

    def generate(context, builder, signature, arguments):
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


@njit(**STRICT_PART)
def power_of_two(exponent):
    """Return 2^exponent as fp32 for an int32 from -126 to 127."""
    return np.int32((exponent + np.int32(127)) << np.int32(23)).view(np.float32)


@njit(**STRICT_PART)
def exp(x):
    """Return e^x to 2 units in the last place; NaN stays NaN."""
    inside = min(max(x, _LOWEST), _HIGHEST)
    shifted = fma(inside, _LOG2_E, _ROUNDER)
    exponent = np.int32(np.float32(shifted).view(np.int32) - _ROUNDER_BITS)
    whole = shifted - _ROUNDER
    r = fma(whole, -_LN2_LOW, fma(whole, -_LN2_HIGH, inside))
    p = fma(fma(fma(fma(fma(_P0, r, _P1), r, _P2), r, _P3), r, _P4), r, _P5)
    value = fma(p, r * r, r) + _ONE
    half = np.int32(exponent >> np.int32(1))
    result = value * power_of_two(half) * power_of_two(np.int32(exponent - half))
    return result if x == x else x


@njit(**STRICT_PART)
def sigmoid(x):
    return _ONE / (_ONE + exp(-x))


@njit(**STRICT_PART)
def silu(x):
    return x / (_ONE + exp(-x))


@njit(**STRICT_PART)
def softplus(x):
    """Return log(1 + e^x) to 4 units in the last place; above 20 it is x. NaN stays NaN."""
    y = exp(-abs(x))
    # log(1 + y) is 2 artanh(y / (2 + y)). For y up to 1 the omitted terms of its series are below
    # the last bit.
    z = y / (_TWO + y)
    w = z * z
    series = fma(fma(fma(fma(fma(fma(_A13, w, _A11), w, _A9), w, _A7), w, _A5), w, _A3), w, _ONE)
    return max(x, np.float32(0)) + _TWO * z * series if x == x else x


@njit(**STRICT_PART)
def cos_and_sin(x):
    """Return cosine and sine of fp32 x for |x| below 1.6 million.

    The error is half a unit in the last place or hardly more.
    """
    angle = np.float64(x)
    quarter = np.rint(angle * _PI_HALVES)
    r = (angle - quarter * _HALF_PI_HIGH) - quarter * _HALF_PI_LOW
    w = r * r
    sin = r + r * w * (_S3 + w * (_S5 + w * (_S7 + w * (_S9 + w * (_S11 + w * _S13)))))
    cos = 1 + w * (_C2 + w * (_C4 + w * (_C6 + w * (_C8 + w * (_C10 + w * (_C12 + w * _C14))))))
    turn = np.int64(quarter) & 3
    if turn & 1:
        cos, sin = -sin, cos
    if turn & 2:
        cos = -cos
        sin = -sin
    return np.float32(cos), np.float32(sin)
