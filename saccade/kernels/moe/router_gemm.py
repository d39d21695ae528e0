"""The router GEMM: all experts' rows by all tokens, exact enough to decide between close scores. Knows no rules.

    parts  [3, E, H] bfloat16    high + middle + low = the float32 weight, exactly: 24 = 3 x 8 bits
    logits [splits, T, E]        float32, split-K partials; `routing.route` adds them up

    program (token tile, expert tile, split)    E = 257:  | 128 | 128 | 1 padded to 16 |

One TF32 GEMM would round the weights to 11 bits. Three bfloat16 GEMMs have exact terms and need no conversion of x.
Tensor cores round sums down, so a long chain of MMAs into one accumulator is off by 1e-5: each step of INPUTS columns
has its own accumulator, and CUDA cores add them up. Other dtypes of x take the float32 weight and three TF32 GEMMs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels.launch.device import is_hopper, num_sms
from saccade.kernels.launch.pdl import pdl_options, pdl_release_then_wait, prefetch_l2, supports_pdl
from saccade.kernels.launch.varlen_tiles import power_of_two

_PARTS = 3
_FEW = 16  # tokens: the narrowest side of an MMA
_MANY = 4096  # tokens whose large tiles fill the SMs
_MAX_SPLITS = 16
_LINE = 64  # bfloat16 elements of a cache line


class RouterConfig(NamedTuple):
    tokens: int  # of a program
    experts: int
    inputs: int  # columns it reads at a time
    splits: int
    warps: int = 4
    stages: int = 3


def split_router(weight: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """float32 [E, H] -> its parts [3, E, H], the largest first. Once per model."""
    parts = []
    remainder = weight.float()
    for _ in range(_PARTS):
        parts.append(remainder.to(dtype))
        remainder = remainder - parts[-1].float()
    return torch.stack(parts)


def router_logits(x: Tensor, weight: Tensor, config: RouterConfig | None = None) -> Tensor:
    """x [T, H], weight float32 [E, H] or its parts in x's dtype -> float32 [splits, T, E], to be summed over splits."""
    tokens, inputs = x.shape
    experts = weight.shape[-2]
    is_split = weight.dim() == 3
    if config is None:
        large = is_hopper(x.device)
        config = choose_router(tokens, experts, inputs, num_sms(x.device), large)
        if not (is_split or large):
            config = config._replace(inputs=32)  # more float32 operands would spill registers
    assert weight.dtype == (x.dtype if is_split else torch.float32) and weight.is_contiguous() and x.stride(1) == 1
    out = torch.empty((config.splits, tokens, experts), dtype=torch.float32, device=x.device)
    pdl = supports_pdl(x)
    share = triton.cdiv(triton.cdiv(inputs, config.inputs), config.splits) * config.inputs  # columns of a split
    last = power_of_two(experts % config.experts, minimum=16) if experts % config.experts else 0
    _router_kernel[(triton.cdiv(tokens, config.tokens), triton.cdiv(experts, config.experts), config.splits)](
        x, weight, out, tokens, x.stride(0), E=experts, K=inputs, SHARE=share,
        TOKENS=config.tokens, EXPERTS=config.experts, REST=last if last < config.experts else 0, INPUTS=config.inputs,
        PARTS=_PARTS if is_split else 1, EVEN=share * config.splits == inputs,
        PREFETCH=is_split and pdl and tokens <= _FEW and inputs % share == 0 and share % _LINE == 0, PDL=pdl,
        num_warps=config.warps, num_stages=config.stages, **pdl_options(pdl),
    )  # fmt: skip
    return out


def choose_router(tokens: int, experts: int, inputs: int, programs: int, large: bool = True) -> RouterConfig:
    """Few tokens: small tiles of experts, so that the weight is read by all SMs. Columns are split among programs.

    Not `large`: for GPUs that have not the shared memory or the registers for 128 experts.
    """
    if tokens <= _FEW:
        tile = RouterConfig(tokens=_FEW, experts=16, inputs=64, splits=3 * programs)
    elif tokens < _MANY:
        tile = RouterConfig(tokens=min(64, power_of_two(tokens)), experts=64, inputs=64, splits=2 * programs)
    else:
        side = 128 if large and experts >= 128 else 64
        tile = RouterConfig(tokens=128, experts=side, inputs=64, splits=programs, warps=8)
    side = min(tile.experts, power_of_two(experts, minimum=16))
    tiles = triton.cdiv(tokens, tile.tokens) * max(1, experts // side)
    steps = triton.cdiv(inputs, tile.inputs)
    max_splits = max(1, min(_MAX_SPLITS, tile.splits // tiles, steps))
    splits = triton.cdiv(steps, triton.cdiv(steps, max_splits))  # none without columns
    return tile._replace(experts=side, splits=splits)


@triton.jit(do_not_specialize=["T"])
def _router_kernel(
    x: tl.tensor, weight: tl.tensor, out: tl.tensor, T: tl.tensor, x_row: tl.tensor,
    E: tl.constexpr, K: tl.constexpr, SHARE: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
    REST: tl.constexpr, INPUTS: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr, PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    first = tl.program_id(1) * EXPERTS
    if REST == 0 or first + EXPERTS <= E:
        _tile(x, weight, out, T, x_row, first, E, K, SHARE, TOKENS, EXPERTS, INPUTS, PARTS, EVEN, PREFETCH, PDL)
    else:
        _tile(x, weight, out, T, x_row, first, E, K, SHARE, TOKENS, REST, INPUTS, PARTS, EVEN, PREFETCH, PDL)


@triton.jit
def _tile(
    x: tl.tensor, weight: tl.tensor, out: tl.tensor, T: tl.tensor, x_row: tl.tensor, first: tl.tensor,
    E: tl.constexpr, K: tl.constexpr, SHARE: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
    INPUTS: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Rows after the last are the last one again."""
    split = tl.program_id(2)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    experts = first + tl.arange(0, EXPERTS)
    rows = x + tl.minimum(tokens, T - 1)[:, None].to(tl.int64) * x_row  # [TOKENS, 1]
    weight_rows = weight + tl.minimum(experts, E - 1)[:, None] * K  # [EXPERTS, 1]
    if PREFETCH:
        for part in tl.static_range(PARTS):
            for line in tl.static_range(0, SHARE, 64):
                prefetch_l2(weight_rows + part * E * K + split * SHARE + line)
    pdl_release_then_wait(PDL)
    acc = tl.zeros([TOKENS, EXPERTS], tl.float32)
    for k in range(0, SHARE, INPUTS):
        inputs = split * SHARE + k + tl.arange(0, INPUTS)[None, :]
        here = _load(rows, inputs, K, EVEN)
        if PARTS == 1:
            weights = _load(weight_rows, inputs, K, EVEN)
            acc = tl.dot(here.to(tl.float32), tl.trans(weights), acc, input_precision="tf32x3")
        else:
            high = _load(weight_rows, inputs, K, EVEN)
            middle = _load(weight_rows + E * K, inputs, K, EVEN)
            low = _load(weight_rows + 2 * E * K, inputs, K, EVEN)
            step = tl.dot(here, tl.trans(low))
            step = tl.dot(here, tl.trans(middle), step)
            acc += tl.dot(here, tl.trans(high), step)
    target = (tl.cast(split, tl.int64) * T + tokens)[:, None] * E + experts[None, :]
    tl.store(out + target, acc, mask=(tokens < T)[:, None] & (experts < E)[None, :])


@triton.jit
def _load(rows: tl.tensor, inputs: tl.tensor, K: tl.constexpr, EVEN: tl.constexpr) -> tl.tensor:
    """Columns `inputs` of rows; zero after K."""
    at = rows + inputs
    return tl.load(at) if EVEN else tl.load(at, mask=inputs < K, other=0.0)
