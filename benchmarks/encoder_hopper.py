"""The Hopper attention kernel beside the plain one: is it right, also where weights outgrow its level, and how fast?

python -m benchmarks.encoder_hopper        (needs a GPU of compute capability 9.0)
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.encoder_inputs import CUDA, Call, device_ms
from saccade.kernels.attention.vit_hopper import HopperVit
from saccade.kernels.attention.vit_schedule import TileSchedule
from saccade.kernels.attention.vit_triton import TILE_ROWS, packed_vit
from saccade.kernels.launch.device import num_sms
from saccade.kernels.launch.varlen_tiles import Tiles
from saccade.models.layers.torch_attention import packed_attention

HEADS, SCALE, LAUNCHES = 16, 80**-0.5, 12
SIZES = {"1288x952": [6256], "644x476": [1564], "8 of 644x476": [1564] * 8, "1280x720": [4784], "2560x1440": [18768]}


def main() -> None:
    with torch.inference_mode():
        for dim in (72, 80):
            for lengths in ([256, 320, 1564, 385], [1564], [4784]):
                compare(dim, lengths)
        for name, lengths in SIZES.items():
            time(name, lengths)


def shares(lengths: list[int]) -> TileSchedule:
    return TileSchedule.of(lengths, HEADS, num_sms(CUDA), CUDA)


def compare(dim: int, lengths: list[int]) -> None:
    """Lengths that end just before, at and after a tile; keys that take the weights past what float32 holds."""
    plain = heads(lengths, dim)
    grown = plain.clone()
    grown[[30, 200, 250], 1] *= 300
    for name, qkv in (("random", plain), ("outgrown", grown)):
        expected = packed_attention(*qkv.float().unbind(1), lengths, SCALE)
        found = HopperVit(shares(lengths))(qkv, SCALE).float()
        worst, mean = (found - expected).abs().max(), (found - expected).abs().mean()
        print(f"{name:9} d {dim}, {len(lengths)} pictures: largest error {worst:.4f}, mean {mean:.6f}", flush=True)


def time(name: str, lengths: list[int]) -> None:
    qkv = heads(lengths, 80)
    plan = shares(lengths)
    fast = kernel_ms(partial(HopperVit(plan), qkv, SCALE))
    slow = kernel_ms(partial(packed_vit, *qkv.unbind(1), Tiles.of(lengths, TILE_ROWS, CUDA), SCALE))
    speed = sum(4 * n * n * 80 * HEADS for n in lengths) / fast / 1e9
    print(f"{name:14} {fast * 1e3:8.1f} us ({plan.slots} parts, {speed:.0f} TFLOP/s), plain {slow * 1e3:8.1f} us")


def kernel_ms(call: Call) -> float:
    """Of one launch among many in a graph: alone it would be the host's time."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            call()
    return device_ms(graph.replay, 0.15) / LAUNCHES


def heads(lengths: list[int], dim: int) -> Tensor:
    return torch.randn(sum(lengths), 3, HEADS, dim, device=CUDA, dtype=torch.bfloat16)


if __name__ == "__main__":
    main()
