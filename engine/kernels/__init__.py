"""Triton kernels of the device side. Each module holds its kernels, launched by one typed function per operation.

Imported only where a CUDA device is used; tests run the same code in Triton's interpreter and compile it for sm_90.
"""
