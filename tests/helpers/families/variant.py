"""One way to compile a kernel, for `compile_kernels`."""

from __future__ import annotations

from typing import Any, NamedTuple

BF16 = "*bf16"
F32 = "*fp32"
I32 = "*i32"
I64 = "*i64"
NONE = "none"  # an argument that is None
ONE = "one"  # an integer that is 1: Triton makes a constant of it


class Variant(NamedTuple):
    name: str
    kernel: str  # module and function
    types: list[str]  # of the arguments that are no constants, in their order; see `is_aligned`
    constants: list[object]  # the constexpr arguments, in their order
    options: dict[str, Any]


def is_aligned(kind: str) -> bool:
    """Pointers are multiples of 16 bytes unless they end with ":1"; integers are multiples of 16 if with ":16"."""
    return kind.endswith(":16") or (kind.startswith("*") and not kind.endswith(":1"))
