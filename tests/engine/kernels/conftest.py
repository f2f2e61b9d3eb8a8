"""Kernels run in Triton's interpreter here: the same code, on the CPU. To be chosen before a kernel is imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"
