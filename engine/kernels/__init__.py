"""Kernels, launched by one typed function per operation.

`host/` is numba's. `device/` is Triton's, imported only where a CUDA device is used; tests run the
same code in its interpreter and compile it for sm_90.
"""
