"""Kernels, launched by one typed function per operation.

`host`, `in_place`, `rms_norm` and `rotate` are numba's, for the host. All others are Triton's, for the device: imported
only where a CUDA device is used; tests run the same code in Triton's interpreter and compile it for sm_90.
"""
