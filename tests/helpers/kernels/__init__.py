"""Kernels in the interpreter and in the compiler."""
