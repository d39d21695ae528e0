"""Decode attention on a Hopper GPU beside the plain kernel: is it right, how long do contexts take, equal and unequal?

python -m benchmarks.decode_hopper        (needs a GPU of compute capability 9.0)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.encoder_inputs import CUDA, device_ms
from saccade.kernels.attention.decode_hopper import hopper_decode
from saccade.kernels.attention.decode_hopper_schedule import plan_schedule
from saccade.kernels.attention.decode_triton import DecodeWorkspace, NewTokens, paged_decode
from saccade.kernels.launch.device import Heads, num_sms

LAYERS = 4  # of keys and values, so that none are found in the cache
BLOCK, LONGEST = 16, 3356
SHAPES = {"Qwen2-VL-2B": Heads(12, 2, 128), "Qwen2.5-VL-7B": Heads(28, 4, 128)}
REQUESTS = (16, 32, 64, 128)

Attend = Callable[[Tensor, Tensor], Tensor]


def main() -> None:
    with torch.inference_mode():
        for name, heads in SHAPES.items():
            for requests in REQUESTS:
                each = torch.arange(requests, device=CUDA)
                compare(f"{name}, equal", heads, torch.full_like(each, 1064, dtype=torch.int32))
                compare(f"{name}, unequal", heads, torch.where(each % 4 == 1, LONGEST, 300).int())


def compare(name: str, heads: Heads, seq_lens: Tensor) -> None:
    requests, blocks = len(seq_lens), -(-LONGEST // BLOCK)
    tables = torch.randint(0, requests * 80, (requests, blocks), device=CUDA, dtype=torch.int32)
    caches = torch.randn(
        2, LAYERS, requests * 80 * BLOCK, heads.num_kv_heads, heads.head_dim, device=CUDA, dtype=torch.bfloat16
    )
    qkv = torch.randn(4, requests, heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim, device=CUDA) / 2
    cos, sin = torch.randn(2, requests, heads.head_dim, device=CUDA).bfloat16()
    new = NewTokens(qkv, cos, sin, torch.full_like(seq_lens, -1))  # stored nowhere
    workspace = DecodeWorkspace.allocate(requests, *heads, CUDA)
    shares = plan_schedule(seq_lens, heads.num_kv_heads, num_sms(CUDA))

    def plain(k: Tensor, v: Tensor) -> Tensor:
        return paged_decode(new, k, v, tables, seq_lens, BLOCK, 0.1, workspace)

    def shared(k: Tensor, v: Tensor) -> Tensor:
        return hopper_decode(new, k, v, tables, seq_lens, BLOCK, 0.1, workspace, schedule=shares)

    expected, found = (attend(caches[0, 0], caches[1, 0]).float() for attend in (plain, shared))
    error = float((found - expected).norm() / expected.norm())
    times = [graph_us(attend, caches) for attend in (plain, shared)]
    print(
        f"{name:24} {requests:4}: plain {times[0]:6.1f} us, shared out {times[1]:6.1f}, apart {error:.1e}", flush=True
    )


def graph_us(attend: Attend, caches: Tensor) -> float:
    """Of one layer among others in a graph."""
    attend(caches[0, 0], caches[1, 0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for k, v in zip(caches[0], caches[1], strict=True):
            attend(k, v)
    return device_ms(graph.replay) * 1e3 / LAYERS


if __name__ == "__main__":
    main()
