"""GEMMs of a decode step and of many rows, with plain and INT4 weights, beside cuBLAS."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.harness import DEVICE, DTYPE, Call, Case, compute_us, copies, random, read_us
from saccade.kernels.gemm.int4_linear import Int4Weight, Norm, choose_int4, int4_linear
from saccade.kernels.gemm.skinny import (
    SplitWorkspace,
    choose,
    gated_linear,
    norm_gated_linear,
    norm_linear,
    skinny_linear,
)
from saccade.kernels.launch.device import is_hopper, num_sms
from saccade.kernels.ops import norm, reference, vit_elementwise
from saccade.kernels.ops.unpack_int4 import unpack_int4

EPS = 1e-6
FEW_ROWS = 16  # up to which a launch norms its own rows


class Gemm(NamedTuple):
    """A product of a layer. The weight has twice as many rows where a gate is beside what it gates."""

    name: str
    outputs: int
    inputs: int
    gated: bool = False
    normed: bool = False  # in the same launch, where rows are few
    group: int = 128  # of an INT4 weight
    has_zeros: bool = True

    @property
    def weight_rows(self) -> int:
        return self.outputs * (2 if self.gated else 1)


class Activation(NamedTuple):
    """A product of many rows that ends with an activation."""

    act: str
    inputs: int
    weight_rows: int
    has_bias: bool
    rows: Sequence[int]
    dtype: torch.dtype = DTYPE


QWEN2_2B = (
    Gemm("qkv", 2048, 1536, normed=True),
    Gemm("out", 1536, 1536),
    Gemm("gate_up", 8960, 1536, gated=True, normed=True),
    Gemm("down", 1536, 8960),
    Gemm("head", 151936, 1536, normed=True),
)
QWEN3_8B = (
    Gemm("qkv", 6144, 4096, normed=True),
    Gemm("out", 4096, 4096),
    Gemm("gate_up", 12288, 4096, gated=True, normed=True),
    Gemm("down", 4096, 12288),
)
ROWS = (1, 8, 16, 32, 64, 128)
INT4_ROWS = (1, 8, 32, 64)
ACTIVATIONS = (  # of Qwen2-VL-2B's tower, and of a prompt's gate and up
    Activation("quick_gelu", 1280, 5120, True, (512, 1024, 1564, 2048, 4784, 6256, 12512)),
    Activation("silu_and_mul", 1536, 17920, False, (128, 512, 1024, 1600, 2700, 8192)),
    *(  # rows, inputs and outputs that end inside a tile
        Activation(*sizes, dtype=dtype)
        for dtype in (torch.bfloat16, torch.float16)
        for sizes in (
            ("tanh_gelu", 1008, 1104, True, (1, 129, 700)),
            ("silu_and_mul", 1280, 2 * 3424, True, (300, 1564)),
        )
    ),
)
QKV_ROWS = (512, 1024, 1280, 1664, 2048, 4784, 6256, 12512, 1, 129, 700, 1564)  # the last end inside a tile


def decode(gemms: Iterable[Gemm] = QWEN2_2B, rows: Iterable[int] = ROWS) -> Iterator[Case]:
    for gemm in gemms:
        weights = [_weight(gemm.weight_rows, gemm.inputs) for _ in range(copies(2 * gemm.weight_rows * gemm.inputs))]
        by = torch.rand(gemm.inputs, device=DEVICE).to(DTYPE) + 0.5
        for count in rows:
            is_normed = gemm.normed and count <= FEW_ROWS
            yield _decode_case(gemm, random(count, gemm.inputs), by if is_normed else None, weights)


def _decode_case(gemm: Gemm, x: Tensor, by: Tensor | None, weights: Sequence[Tensor]) -> Case:
    ours = {**_skinny(gemm, x, by, weights), **_split_k(gemm, _normed(x, by), weights)}
    beside = {"cuBLAS": [partial(_by_cublas, gemm, x, by, weight) for weight in weights]}
    floor = read_us(weights[0].nbytes)
    exact = _product(gemm, _normed(x.float(), by), weights[0].float())
    return Case(f"{gemm.name} {len(x)}", ours, floor, exact, beside, read=whole)


def _skinny(gemm: Gemm, x: Tensor, by: Tensor | None, weights: Sequence[Tensor]) -> dict[str, list[Call]]:
    config = choose(len(x), gemm.outputs, gemm.inputs, DTYPE, gated=gemm.gated)
    if config is None:
        return {}
    workspace = SplitWorkspace.allocate(128, DEVICE)
    if by is not None and gemm.gated:
        return {"skinny": [partial(norm_gated_linear, x, by, EPS, w, config=config) for w in weights]}
    if gemm.gated:
        return {"skinny": [partial(gated_linear, x, w, config=config) for w in weights]}
    if by is not None:
        run = partial(norm_linear, workspace=workspace, config=config)
        return {"skinny": [partial(run, x, by, EPS, w, None) for w in weights]}
    run = partial(skinny_linear, workspace=workspace, config=config)
    return {"skinny": [partial(run, x, w, None, None) for w in weights]}


def _split_k(gemm: Gemm, x: Tensor, weights: Sequence[Tensor]) -> dict[str, list[Call]]:
    """Of rows that are normed already; without what adds the parts."""
    if not is_hopper(DEVICE):
        return {}
    from saccade.kernels.gemm import hopper_split_k as kernel

    if not kernel.suits(len(x), gemm.outputs, gemm.inputs, DTYPE):
        return {}
    if gemm.gated:
        config = kernel.choose_gated(len(x))
        return {"split-K": [partial(kernel.split_k_gated_linear, x, w, config) for w in weights]}
    config = kernel.choose_split_k(len(x), *weights[0].shape)
    return {"split-K": [partial(kernel.split_k_linear, x, w, None, config) for w in weights]}


def _by_cublas(gemm: Gemm, x: Tensor, by: Tensor | None, weight: Tensor) -> Tensor:
    out = F.linear(_normed(x, by), weight)
    return norm.silu_and_mul(out) if gemm.gated else out


def _normed(x: Tensor, by: Tensor | None) -> Tensor:
    if by is None:
        return x
    return F.rms_norm(x, by.shape, by.to(x.dtype), EPS)


def _product(gemm: Gemm, x: Tensor, weight: Tensor) -> Tensor:
    out = F.linear(x, weight)
    if not gemm.gated:
        return out
    gate, up = out.chunk(2, dim=-1)
    return F.silu(gate) * up


def whole(out: Tensor) -> Tensor:
    """The sum of what splits of the inputs gave."""
    if out.dim() == 3:
        return out.sum(0)
    return out


def _weight(rows: int, inputs: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return random(rows, inputs, dtype=dtype).mul_(inputs**-0.5)


# --- INT4 ---------------------------------------------------------------------------------------------------------


def int4(gemms: Iterable[Gemm] = QWEN3_8B, rows: Iterable[int] = INT4_ROWS) -> Iterator[Case]:
    for gemm in gemms:
        count = copies(gemm.weight_rows * gemm.inputs / 2)
        weights = [int4_weight(gemm.weight_rows, gemm.inputs, gemm.group, gemm.has_zeros) for _ in range(count)]
        exact = reference.unpacked_int4(weights[0])
        size = sum(part.nbytes for part in weights[0] if part is not None)
        out = torch.empty(gemm.weight_rows, gemm.inputs, device=DEVICE, dtype=DTYPE)
        unpack: dict[str, list[Call]] = {"triton": [partial(unpack_int4, *weight, out) for weight in weights]}
        yield Case(f"int4 unpack {gemm.name}", unpack, read_us(size + out.nbytes), exact.to(DTYPE), limit=0)
        for number in rows:
            x = random(number, gemm.inputs)
            by = Norm(torch.rand(gemm.inputs, device=DEVICE).to(DTYPE) + 0.5, EPS)
            yield from _int4_cases(gemm, x, by, weights, exact, read_us(size))


def _int4_cases(
    gemm: Gemm, x: Tensor, by: Norm, weights: Sequence[Int4Weight], exact: Tensor, floor_us: float
) -> Iterator[Case]:
    name = f"int4 {gemm.name} {len(x)}"
    config = choose_int4(len(x), gemm.outputs, gemm.inputs, gated=gemm.gated)
    if config is not None:
        first = by if gemm.normed and len(x) == 1 and config.rows == 1 else None
        options = {"norm": first, "gated": gemm.gated, "config": config}
        run = partial(int4_linear, workspace=SplitWorkspace.allocate(128, DEVICE), **options)  # type: ignore[arg-type]
        ours = {"skinny": [partial(run, x, weight) for weight in weights]}
        rows = _normed(x.float(), first and first.weight)
        yield Case(name, ours, floor_us, _product(gemm, rows, exact))
    if is_hopper(DEVICE):
        yield Case(name, _int4_split_k(gemm, x, weights), floor_us, _product(gemm, x.float(), exact), read=whole)


def _int4_split_k(gemm: Gemm, x: Tensor, weights: Sequence[Int4Weight]) -> dict[str, list[Call]]:
    from saccade.kernels.gemm import hopper_int4_split_k as kernel

    if gemm.gated:
        config = kernel.choose_gated(len(x))
        return {"split-K": [partial(kernel.int4_split_k_gated_linear, x, weight, config) for weight in weights]}
    config = kernel.choose_split_k(len(x), gemm.outputs, gemm.inputs, gemm.group)
    return {"split-K": [partial(kernel.int4_split_k_linear, x, weight, None, config) for weight in weights]}


def int4_weight(rows: int, columns: int, group: int, has_zeros: bool, experts: Sequence[int] = ()) -> Int4Weight:
    packed = torch.randint(-(2**15), 2**15, (*experts, rows, columns // 4), device=DEVICE, dtype=torch.int16)
    groups = (*experts, rows, columns // group)
    scales = ((torch.rand(groups, device=DEVICE) + 0.5) * 0.2 * columns**-0.5).half()
    zeros = torch.randint(6, 11, groups, device=DEVICE, dtype=torch.uint8) if has_zeros else None
    return Int4Weight(packed, scales, zeros)


# --- many rows ----------------------------------------------------------------------------------------------------

_ACTS = {
    "quick_gelu": vit_elementwise.quick_gelu,
    "tanh_gelu": vit_elementwise.tanh_gelu,
    "silu_and_mul": norm.silu_and_mul,
}


def activation(works: Iterable[Activation] = ACTIVATIONS) -> Iterator[Case]:
    """One launch on Hopper GPUs; cuBLAS and a launch for the activation; cuBLAS alone."""
    for work in works:
        count = copies(2 * work.weight_rows * work.inputs, 12)
        weights = [_weight(work.weight_rows, work.inputs, work.dtype) for _ in range(count)]
        bias = random(work.weight_rows, dtype=work.dtype) if work.has_bias else None
        for rows in work.rows:
            x = random(rows, work.inputs, dtype=work.dtype)
            ours: dict[str, list[Call]] = {
                "two launches": [partial(_two_launches, x, weight, bias, work.act) for weight in weights]
            }
            if is_hopper(DEVICE):
                from saccade.kernels.gemm.hopper_act import hopper_linear_act

                programs = num_sms(DEVICE)
                ours["one launch"] = [partial(hopper_linear_act, x, w, bias, work.act, programs) for w in weights]
            exact = reference.linear_act(
                x.float(), weights[0].float(), None if bias is None else bias.float(), work.act
            )
            floor = compute_us(2 * rows * work.inputs * work.weight_rows)
            beside = {"cuBLAS alone": [partial(F.linear, x, weight, bias) for weight in weights]}
            name = f"{work.act} {work.inputs} to {work.weight_rows}, {rows} rows, {str(work.dtype)[6:]}"
            yield Case(name, ours, floor, exact, beside)


def _two_launches(x: Tensor, weight: Tensor, bias: Tensor | None, act: str) -> Tensor:
    return _ACTS[act](F.linear(x, weight, bias))


def qkv_rope(rows: Iterable[int] = QKV_ROWS, heads: int = 16, inputs: int = 1280, dim: int = 80) -> Iterator[Case]:
    """Queries and keys of an image turned by their product, on Hopper GPUs; beside it a launch that turns."""
    weights = [_weight(3 * heads * dim, inputs) for _ in range(copies(6 * heads * dim * inputs, 12))]
    bias = random(3 * heads * dim)
    for count in rows:
        x = random(count, inputs)
        angles = 100 * torch.rand(count, dim // 2, device=DEVICE)
        rotary = torch.stack((angles.cos(), angles.sin()), dim=-1).flatten(1)
        ours: dict[str, list[Call]] = {"two launches": [partial(_turned, x, w, bias, rotary, heads) for w in weights]}
        exact = reference.qkv_rope(x.float(), weights[0].float(), bias.float(), rotary, heads)
        beside = {"cuBLAS alone": [partial(F.linear, x, weight, bias) for weight in weights]}
        floor = compute_us(6 * count * heads * dim * inputs)
        usual = partial(_parted, columns=reference.parted_columns(heads, dim))
        yield Case(f"qkv and RoPE, {count} rows", ours, floor, exact, beside, read=usual)
        if is_hopper(DEVICE):
            from saccade.kernels.gemm.hopper_vit_qkv_rope import hopper_qkv_rope

            programs = num_sms(DEVICE)
            ours = {"one launch": [partial(hopper_qkv_rope, x, w, bias, rotary, heads, programs) for w in weights]}
            yield Case(f"qkv and RoPE, {count} rows", ours, floor, exact)


def _turned(x: Tensor, weight: Tensor, bias: Tensor, rotary: Tensor, heads: int) -> Tensor:
    qkv = F.linear(x, weight, bias).view(len(x), 3, heads, -1)
    vit_elementwise.rotate_half(qkv, rotary)
    return qkv


def _parted(qkv: Tensor, columns: list[int]) -> Tensor:
    """With the columns where the kernel of one launch writes them."""
    return qkv.flatten(1)[:, columns].view_as(qkv)
