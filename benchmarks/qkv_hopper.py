"""Queries and keys turned by their product on a Hopper GPU: one launch beside cuBLAS and a launch that turns.

python -m benchmarks.qkv_hopper        (needs a GPU of compute capability 9.0)

Shapes are those of Qwen2-VL-2B's tower. Times are of graphs over different weights in a row, in turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.encoder_inputs import CUDA, relative
from benchmarks.linear_hopper import replay_us
from saccade.kernels.gemm.hopper_vit_qkv_rope import DIM, hopper_qkv_rope
from saccade.kernels.launch.device import num_sms
from saccade.kernels.ops import reference, vit_elementwise

HEADS, INPUTS = 16, 1280
LAYERS, ROUNDS = 12, 9
ROWS = (512, 768, 1024, 1152, 1280, 1664, 2048, 4784, 6256, 10764, 12512)


class Inputs(NamedTuple):
    x: Tensor
    bias: Tensor
    rotary: Tensor


Product = Callable[[Inputs, Tensor], Tensor]


def one_launch(given: Inputs, weight: Tensor) -> Tensor:
    return hopper_qkv_rope(given.x, weight, given.bias, given.rotary, HEADS, num_sms(CUDA))


def two_launches(given: Inputs, weight: Tensor) -> Tensor:
    qkv = F.linear(given.x, weight, given.bias).view(len(given.x), 3, HEADS, DIM)
    vit_elementwise.rotate_half(qkv, given.rotary)
    return qkv


def main() -> None:
    with torch.inference_mode():
        for dtype in (torch.bfloat16, torch.float16):
            for rows in (1, 129, 700, 1564):  # rows that end inside a tile, and tiles in halves
                compare(rows, dtype)
        weights = [weight_of(torch.bfloat16) for _ in range(LAYERS)]
        for rows in ROWS:
            time(rows, weights)


def compare(rows: int, dtype: torch.dtype) -> None:
    given, weight = inputs_of(rows, dtype), weight_of(dtype)
    exact = reference.qkv_rope(given.x.float(), weight.float(), given.bias.float(), given.rotary, HEADS)
    two = two_launches(given, weight).flatten(1)[:, reference.parted_columns(HEADS, DIM)].view_as(exact)
    errors = (relative(found, exact) for found in (one_launch(given, weight), two))
    print(f"{rows:5} {dtype}: error", ", of two launches ".join(f"{error:.6f}" for error in errors), flush=True)


def time(rows: int, weights: Sequence[Tensor]) -> None:
    given = inputs_of(rows, torch.bfloat16)
    ways: tuple[Product, ...] = (one_launch, two_launches, lambda given, weight: F.linear(given.x, weight, given.bias))
    graphs = [recorded(way, given, weights) for way in ways]
    times = [[replay_us(graph) for graph in graphs] for _ in range(ROUNDS)]
    one, two, product = (statistics.median(column) / len(weights) for column in zip(*times, strict=True))
    print(f"{rows:5}: one launch {one:6.1f} us = {one / two:.3f} of two {two:6.1f}, product alone {product:6.1f}",
          flush=True)  # fmt: skip


def recorded(way: Product, given: Inputs, weights: Sequence[Tensor]) -> torch.cuda.CUDAGraph:
    way(given, weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            way(given, weight)
    return graph


def inputs_of(rows: int, dtype: torch.dtype) -> Inputs:
    x = torch.randn(rows, INPUTS, device=CUDA, dtype=dtype)
    bias = torch.randn(3 * HEADS * DIM, device=CUDA, dtype=dtype)
    angles = 100 * torch.rand(rows, DIM // 2, device=CUDA)
    return Inputs(x, bias, torch.stack((angles.cos(), angles.sin()), dim=-1).flatten(1))


def weight_of(dtype: torch.dtype) -> Tensor:
    return torch.randn(3 * HEADS * DIM, INPUTS, device=CUDA, dtype=dtype).mul_(INPUTS**-0.5)


if __name__ == "__main__":
    main()
