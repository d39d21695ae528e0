"""The gate of an MLP, inside a kernel. Knows numbers, no rows."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gated(gate: tl.tensor, up: tl.tensor, GELU: tl.constexpr) -> tl.tensor:
    """silu(gate) * up, or with GELU by its tanh formula: (1 + tanh(u)) / 2 is sigmoid(2 u)."""
    inner = gate
    if GELU:
        inner = gate * (1.5957691216057308 + 0.07135481627260025 * gate * gate)
    return gate * tl.sigmoid(inner) * up
