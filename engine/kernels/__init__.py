"""Kernels, launched by one typed function per operation.

`host/` uses numba. `device/` uses Triton and is imported only if a CUDA device is used. Tests run
the same code in Triton's interpreter and compile it for sm_90.
"""
