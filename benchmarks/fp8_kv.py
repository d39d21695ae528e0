"""An FP8 KV cache on a GPU: is it right, and how fast is decode attention beside bfloat16?

    python -m benchmarks.fp8_kv correct      the built-in model on the GPU beside PyTorch on the CPU, both with FP8
    python -m benchmarks.fp8_kv speed        128 requests of 8,192 tokens, heads of Qwen3-VL-8B: ms, GB/s, ratio
    python -m benchmarks.fp8_kv sweep        the same with other launches of the Triton kernel

Kernels against PyTorch: pytest tests/kernels/attention/test_fp8_kv.py, which takes a GPU if there is one.
"""

from __future__ import annotations

import argparse
from itertools import product

import torch
from torch import Tensor

from benchmarks.gpu_timing import attempt, graph_us
from saccade import LLM, SamplingParams
from saccade.kernels.attention.decode import DecodeAttention
from saccade.kernels.attention.decode_triton import DecodeWorkspace, NewTokens, paged_decode
from saccade.kernels.launch.device import Heads
from saccade.kernels.launch.varlen_tiles import Launch
from saccade.models.layers.torch_attention import as_stored

CUDA, FP8 = torch.device("cuda"), torch.float8_e4m3fn
HEADS, BLOCK, SCALE = Heads(32, 8, 128), 16, 128**-0.5
SCALES = (0.05, 0.05)
PROMPTS = [
    f"{word} is a word that" for word in ("Light", "Water", "Stone", "Music", "Paper", "Green", "River", "Bread")
]
TOKENS = 48
LAUNCHES = ((64, 4, 2), (64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 4, 3), (64, 8, 3), (128, 8, 3), (32, 4, 4))
ALLOWED = {"float32": 0.9, "bfloat16": 0.6}  # share of tokens before the first that differs


class Step:
    """A decode step of requests with equal contexts, whose blocks lie anywhere in the cache."""

    def __init__(self, requests: int, context: int) -> None:
        blocks = requests * context // BLOCK
        torch.manual_seed(0)
        self.tables = torch.randperm(blocks, device=CUDA).int().view(requests, -1)
        self.seq_lens = torch.full((requests,), context, dtype=torch.int32, device=CUDA)
        self.cache = torch.randn(
            2, blocks * BLOCK, HEADS.num_kv_heads, HEADS.head_dim, device=CUDA, dtype=torch.bfloat16
        )
        qkv = torch.randn(4, requests, HEADS.num_heads + 2 * HEADS.num_kv_heads, HEADS.head_dim, device=CUDA) / 2
        cos, sin = torch.randn(2, requests, HEADS.head_dim, device=CUDA).bfloat16()
        norms = torch.ones(2, HEADS.head_dim, device=CUDA, dtype=torch.bfloat16)
        self.new = NewTokens(qkv, cos, sin, torch.full_like(self.seq_lens, -1), None, *norms)  # stored nowhere
        self.attention = {
            dtype: DecodeAttention(HEADS, dtype, BLOCK, requests, CUDA, 1e-6) for dtype in (torch.bfloat16, FP8)
        }
        counters = torch.zeros(requests * HEADS.num_kv_heads, dtype=torch.int32, device=CUDA)
        wide = 8 * requests * HEADS.num_heads  # for up to 8 splits
        floats = [torch.empty(wide * size, device=CUDA) for size in (HEADS.head_dim, 1, 1)]
        self.workspace = DecodeWorkspace(*floats, counters)

    def in_fp8(self) -> Tensor:
        return torch.stack([as_stored(cache, 0.05, FP8) for cache in self.cache])

    def attend(self, cache: Tensor) -> Tensor:
        """As the engine does, with the kernel that it chooses."""
        attention = self.attention[cache.dtype]
        schedule = attention.plan(self.seq_lens)
        given = (*cache, self.tables, self.seq_lens, SCALE, schedule, None)
        self.kernel = "triton" if schedule is None else "hopper"
        return attention(self.new, *given, self.scales(cache))

    def triton(self, cache: Tensor, splits: int | None = None, launch: Launch | None = None) -> Tensor:
        given = (*cache, self.tables, self.seq_lens, BLOCK, SCALE, self.workspace)
        return paged_decode(self.new, *given, splits=splits, launch=launch, norm_eps=1e-6, scales=self.scales(cache))

    def scales(self, cache: Tensor) -> tuple[float, float]:
        return SCALES if cache.dtype == FP8 else (1.0, 1.0)


def speed(requests: int, context: int) -> None:
    step = Step(requests, context)
    caches = {"bfloat16": step.cache, "fp8": step.in_fp8()}
    expected = step.attend(step.cache).float()
    times = {}
    for name, cache in caches.items():
        error = float((step.attend(cache).float() - expected).norm() / expected.norm())
        times[name] = graph_us(lambda cache=cache: step.attend(cache))
        rate = cache.nbytes / times[name] / 1e3
        print(f"{name:8} {step.kernel:6} {times[name] / 1e3:7.3f} ms {rate:6.0f} GB/s, apart {error:.1e}", flush=True)
    plain = graph_us(lambda: step.triton(step.cache))
    print(f"bfloat16 in Triton {plain / 1e3:7.3f} ms", flush=True)
    print(f"ratio {times['bfloat16'] / times['fp8']:.2f}", flush=True)


def sweep(requests: int, context: int) -> None:
    step = Step(requests, context)
    cache = step.in_fp8()
    expected = step.triton(cache, 1).float()
    found = []
    for (keys, warps, stages), splits in product(LAUNCHES, (1, 2)):
        launch = Launch(rows=16, keys=keys, warps=warps, stages=stages)
        name = f"keys {keys:3} warps {warps} stages {stages} splits {splits}"
        us = attempt(name, lambda launch=launch, splits=splits: graph_us(lambda: step.triton(cache, splits, launch), 6))
        if us is not None:
            error = float((step.triton(cache, splits, launch).float() - expected).norm() / expected.norm())
            found.append((us, f"{name}: {us / 1e3:.3f} ms {cache.nbytes / us / 1e3:5.0f} GB/s, apart {error:.1e}"))
    for _, line in sorted(found):
        print(line, flush=True)


def correct() -> None:
    expected = _texts("cpu", "float32")
    failed = False
    for dtype, allowed in ALLOWED.items():
        found = _texts("cuda", dtype)
        same = sum(_common(a, b) for a, b in zip(found, expected, strict=True))
        share = same / sum(map(len, expected))
        failed |= share < allowed
        print(f"{dtype}: {share:.1%} of tokens are the CPU's before the first that differs, {allowed:.0%} must be")
    print("FAILED" if failed else "ok")


def _texts(device: str, dtype: str) -> list[list[int]]:
    llm = LLM(device=device, dtype=dtype, kv_cache_dtype="fp8", max_model_len=1024, kv_cache_gb=0.5, use_tqdm=False)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    found = [out.outputs[0].token_ids for out in llm.generate(PROMPTS, params, use_tqdm=False)]
    llm.close()
    return found


def _common(one: list[int], other: list[int]) -> int:
    """Tokens before the first that differs."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["correct", "speed", "sweep"])
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--context", type=int, default=8192)
    args = parser.parse_args()
    with torch.inference_mode():
        if args.what == "correct":
            correct()
        else:
            {"speed": speed, "sweep": sweep}[args.what](args.requests, args.context)


if __name__ == "__main__":
    main()
