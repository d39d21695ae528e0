"""Triton kernels for CUDA devices. They know tensors, strides and block tables; no model, no request.

Import this package only where a CUDA device is in use, or in its tests: all but `sampling_rows` needs Triton.
"""
