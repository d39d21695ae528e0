"""Products that end with an activation on a Hopper GPU: one launch beside cuBLAS and a launch for the activation.

python -m benchmarks.linear_hopper        (needs a GPU of compute capability 9.0)

Shapes are Qwen2-VL-2B's: the tower's first product of an MLP, a prompt's gate and up. Times are of graphs over
different weights in a row, in turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.encoder_inputs import CUDA, relative
from saccade.kernels.gemm.hopper_act import hopper_linear_act
from saccade.kernels.launch.device import num_sms
from saccade.kernels.ops import norm, reference, vit_elementwise

LAYERS, ROUNDS = 12, 9
PLAIN: Mapping[str, Callable[[Tensor], Tensor]] = {
    "quick_gelu": vit_elementwise.quick_gelu,
    "tanh_gelu": vit_elementwise.tanh_gelu,
    "silu_and_mul": norm.silu_and_mul,
}


class Shape(NamedTuple):
    act: str
    inputs: int
    wide: int  # rows of the weight
    has_bias: bool
    rows: Sequence[int]


SHAPES = (
    Shape("quick_gelu", 1280, 5120, True, (256, 512, 768, 1024, 1280, 1564, 1792, 2048, 4784, 6256, 10608, 12512)),
    Shape("silu_and_mul", 1536, 17920, False, (128, 256, 384, 512, 768, 1024, 1216, 1600, 2700, 8192)),
)
ODD = (  # rows, inputs and outputs that end inside a tile
    Shape("quick_gelu", 1280, 5120, True, (1564,)),
    Shape("tanh_gelu", 1008, 1104, True, (1, 129, 700)),
    Shape("silu_and_mul", 1280, 2 * 3424, True, (300, 1564)),
    Shape("silu_and_mul", 1536, 17920, False, (512, 1600)),
)

Product = Callable[[Tensor, Tensor, Tensor | None, str], Tensor]


def one_launch(x: Tensor, weight: Tensor, bias: Tensor | None, act: str) -> Tensor:
    return hopper_linear_act(x, weight, bias, act, num_sms(CUDA))


def two_launches(x: Tensor, weight: Tensor, bias: Tensor | None, act: str) -> Tensor:
    return PLAIN[act](F.linear(x, weight, bias))


def main() -> None:
    with torch.inference_mode():
        for dtype in (torch.bfloat16, torch.float16):
            for shape in ODD:
                compare(shape, dtype)
        for shape in SHAPES:
            weights = [weight_of(shape) for _ in range(LAYERS)]
            for rows in shape.rows:
                time(shape, rows, weights)


def compare(shape: Shape, dtype: torch.dtype) -> None:
    weight, bias = weight_of(shape).to(dtype), bias_of(shape, dtype)
    for rows in shape.rows:
        x = torch.randn(rows, shape.inputs, device=CUDA, dtype=dtype)
        exact = reference.linear_act(x.float(), weight.float(), None if bias is None else bias.float(), shape.act)
        one, two = (relative(way(x, weight, bias, shape.act), exact) for way in (one_launch, two_launches))
        print(f"{shape.act:13} {rows:5} {dtype}: error {one:.6f}, of two launches {two:.6f}", flush=True)


def time(shape: Shape, rows: int, weights: Sequence[Tensor]) -> None:
    x, bias = torch.randn(rows, shape.inputs, device=CUDA, dtype=torch.bfloat16), bias_of(shape, torch.bfloat16)
    ways: dict[str, Product] = {"one": one_launch, "two": two_launches, "product": lambda x, w, b, _: F.linear(x, w, b)}
    graphs = [recorded(way, x, weights, bias, shape.act) for way in ways.values()]
    times = [[replay_us(graph) for graph in graphs] for _ in range(ROUNDS)]
    one, two, product = (statistics.median(column) / len(weights) for column in zip(*times, strict=True))
    speed = 2 * rows * shape.inputs * shape.wide / one / 1e6
    print(f"{shape.act:13} {rows:5}: one launch {one:6.1f} us ({speed:.0f} TFLOP/s) = {one / two:.3f} of two "
          f"{two:6.1f}, product alone {product:6.1f}", flush=True)  # fmt: skip


def recorded(way: Product, x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, act: str) -> torch.cuda.CUDAGraph:
    way(x, weights[0], bias, act)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            way(x, weight, bias, act)
    return graph


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    graph.replay()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    graph.replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e3


def weight_of(shape: Shape) -> Tensor:
    return torch.randn(shape.wide, shape.inputs, device=CUDA, dtype=torch.bfloat16).mul_(shape.inputs**-0.5)


def bias_of(shape: Shape, dtype: torch.dtype) -> Tensor | None:
    return torch.randn(shape.wide, device=CUDA, dtype=dtype) if shape.has_bias else None


if __name__ == "__main__":
    main()
