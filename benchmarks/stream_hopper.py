"""Products in parts on a Hopper GPU beside cuBLAS: are they right, and how long do they take?

python -m benchmarks.stream_hopper        (needs a GPU of compute capability 9.0)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.encoder_inputs import CUDA, device_ms
from saccade.kernels.gemm.hopper_split_k import choose_gated, choose_split_k, split_k_gated_linear, split_k_linear
from saccade.kernels.ops.norm import silu_and_mul

COPIES = 8  # of a weight, so that none is found in the cache
ROWS = (2, 8, 20, 32, 64, 100, 128)
PLAIN = {"qkv": (2048, 1536), "out": (1536, 1536), "down": (1536, 8960)}  # Qwen2-VL-2B
GATED = {"gate and up": (17920, 1536)}

Product = Callable[[Tensor, Tensor], Tensor]


def main() -> None:
    with torch.inference_mode():
        for rows in ROWS:
            for name, (outputs, inputs) in PLAIN.items():
                compare(name, rows, outputs, inputs, _in_parts, F.linear)
            for name, (outputs, inputs) in GATED.items():
                compare(name, rows, outputs, inputs, _gated, _gated_by_cublas)


def compare(name: str, rows: int, outputs: int, inputs: int, ours: Product, cublas: Product) -> None:
    x = torch.randn(rows, inputs, device=CUDA, dtype=torch.bfloat16)
    weights = torch.randn(COPIES, outputs, inputs, device=CUDA, dtype=torch.bfloat16) / inputs**0.5
    exact = _exact(x, weights[0], is_gated=name in GATED)
    errors = [_error(product(x, weights[0]), exact) for product in (ours, cublas)]
    times = [graph_us(product, x, weights) for product in (ours, cublas)]
    print(
        f"{name:12} {rows:4} rows: ours {times[0]:6.1f} us, error {errors[0]:.1e};"
        f" cuBLAS {times[1]:6.1f} us, error {errors[1]:.1e}",
        flush=True,
    )


def graph_us(product: Product, x: Tensor, weights: Tensor) -> float:
    """Of one launch among others in a graph, over weights that are read anew."""
    product(x, weights[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            product(x, weight)
    return device_ms(graph.replay) * 1e3 / len(weights)


def _in_parts(x: Tensor, weight: Tensor) -> Tensor:
    return split_k_linear(x, weight, None, choose_split_k(len(x), *weight.shape))


def _gated(x: Tensor, weight: Tensor) -> Tensor:
    return split_k_gated_linear(x, weight, choose_gated(len(x)))


def _gated_by_cublas(x: Tensor, weight: Tensor) -> Tensor:
    return silu_and_mul(F.linear(x, weight))


def _exact(x: Tensor, weight: Tensor, *, is_gated: bool) -> Tensor:
    found = x.double() @ weight.double().T
    if not is_gated:
        return found
    gate, up = found.chunk(2, dim=-1)
    return F.silu(gate) * up


def _error(found: Tensor, exact: Tensor) -> float:
    whole = found.double().sum(0) if found.dim() == 3 else found.double()
    return float((whole - exact).norm() / exact.norm())


if __name__ == "__main__":
    main()
