"""Kernels of experts: the router, sorting by expert, both GEMMs, and their sum."""
