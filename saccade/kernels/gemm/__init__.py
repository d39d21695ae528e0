"""GEMM kernels for few rows and for many, with plain, FP8 and INT4 weights."""
