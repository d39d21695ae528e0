"""GEMMs of a few rows with an INT4 weight: one on CUDA cores, up to 64 on tensor cores. More rows: `unpack_int4`.

    weight   int16 [N, K / 4]: a unit has a number of each of the four planes, 32 columns, that are 128 columns
    scales   float16 or bfloat16 [N, K / group], groups of 32, 64 or 128 columns
    zeros    uint8 [N, K / group], or none: 8

Number q stands for (q - zero) * scale. `models.int4_weights` draws a unit, and has the reference.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from saccade.kernels.gemm.int4_tiles import int4_tile_kernel
from saccade.kernels.gemm.int4_vector import int4_vector_kernel
from saccade.kernels.gemm.skinny import (
    MAX_PROGRAMS,
    MAX_ROWS,
    Config,
    SplitWorkspace,
    checked_workspace,
    choose_splits,
    prefetched_lines,
)
from saccade.kernels.launch.device import has_async_mma, has_tensor_memory, shared_memory
from saccade.kernels.launch.pdl import pdl_options, supports_pdl
from saccade.kernels.launch.varlen_tiles import power_of_two
from saccade.kernels.ops.norm import rms_norm

MAX_INT4_ROWS = 64
_CHUNK = 128  # columns of 32 units
_WARP_INPUTS = 1024  # a warp reads so many of a row in one instruction
_SPLIT_INPUTS = 1024  # of a split, at least
_MAX_SPLITS = 8
_SCRATCH = 2 << 10  # bytes of shared memory beside the stages of the pipeline


class Int4Weight(NamedTuple):
    weight: Tensor  # int16 [N, K / 4], or of experts [E, N, K / 4]; with a gate its rows first, then as many of `up`
    scales: Tensor
    zeros: Tensor | None = None

    @property
    def inputs(self) -> int:
        return 4 * self.weight.shape[-1]

    @property
    def group(self) -> int:
        return self.inputs // self.scales.shape[-1]

    def check(self, x: Tensor) -> None:
        """That kernels read it, and these rows."""
        assert self.weight.dtype == torch.int16 and self.weight.is_contiguous()
        assert self.scales.is_contiguous() and (self.zeros is None or self.zeros.is_contiguous())
        assert self.zeros is None or self.zeros.dtype == torch.uint8
        assert self.group in (32, 64, 128) and self.inputs % _CHUNK == 0, (self.group, self.inputs)
        assert x.shape[1] == self.inputs and x.stride(1) == 1 and x.element_size() == 2, (x.shape, x.dtype)


class Norm(NamedTuple):
    weight: Tensor  # [K]; may be float32
    eps: float


def int4_linear(
    x: Tensor,  # [M, K], the last dimension dense
    packed: Int4Weight,
    bias: Tensor | None = None,  # [N]
    residual: Tensor | None = None,  # [M, N], contiguous
    *,
    norm: Norm | None = None,
    gated: bool = False,
    workspace: SplitWorkspace | None = None,  # allocated for `MAX_ROWS` rows or more
    config: Config | None = None,
    out: Tensor | None = None,  # [M, N], contiguous
) -> Tensor:
    """x, normed first if asked, @ weight.T + bias + residual: [M, N]; or silu(gate) * up: [M, N / 2]."""
    outputs = len(packed.weight) // (2 if gated else 1)
    config = config or choose_int4(len(x), outputs, packed.inputs, gated=gated)
    assert config is not None and len(x) <= config.rows, (x.shape, config)
    packed.check(x)
    assert config.inputs % _CHUNK == 0, config
    if out is None:
        out = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
    assert out.shape == (len(x), outputs) and out.is_contiguous()
    if config.rows == 1:
        _launch_vector(x, packed, (bias, residual), norm, out, config, gated)
        return out
    normed = x if norm is None else rms_norm(x.contiguous(), norm.weight, norm.eps)
    _launch_tiles(normed, packed, (bias, residual), out, config, workspace, gated)
    return out


def choose_int4(m: int, n: int, k: int, *, gated: bool = False) -> Config | None:
    """The launch of m rows by a weight [n, k], or [2 n, k] if gated; None for more rows than the kernels take.

    As measured on an H200 (docs/experiments/051): a program of few rows reads little, so many of them share a weight.
    """
    if m > MAX_INT4_ROWS:
        return None
    if m == 1:
        return _choose_vector(k, gated)
    rows = power_of_two(m, minimum=16)
    if gated:
        return _choose_gated(rows)
    if k >= _MAX_SPLITS * _SPLIT_INPUTS:
        splits, stages = _choose_splits(rows, n, k, 64, 256), 3 if rows == 16 else 2
        return Config(rows=rows, outputs=64, inputs=256, splits=splits, stages=stages, pdl=False)
    if rows == 16:
        return Config(rows=16, outputs=32, inputs=128, splits=_choose_splits(16, n, k, 32, 128), warps=2)
    return Config(rows=rows, outputs=64, inputs=256, splits=_choose_splits(rows, n, k, 64, 256), stages=3)


def _choose_vector(k: int, gated: bool) -> Config:
    if gated:
        inputs = min(4096, power_of_two(k, minimum=_WARP_INPUTS))
        return Config(rows=1, outputs=4, inputs=inputs, warps=max(1, inputs // (2 * _WARP_INPUTS)), pdl=False)
    inputs = min(2048, power_of_two(k, minimum=_WARP_INPUTS))
    return Config(rows=1, outputs=8, inputs=inputs, warps=inputs // _WARP_INPUTS)


def _choose_gated(rows: int) -> Config:
    if rows == 16:
        return Config(rows=16, outputs=32, inputs=256, warps=2, stages=3)
    if rows == 32:
        return Config(rows=32, outputs=64, inputs=256, stages=3)
    return Config(rows=rows, outputs=32, inputs=128)  # more would spill registers on some GPUs


def _choose_splits(rows: int, n: int, k: int, outputs: int, inputs: int) -> int:
    """One for 1,024 columns, as far as the workspace goes; more where the device would not be full."""
    max_splits = int(MAX_PROGRAMS * MAX_ROWS // (rows * triton.cdiv(n, outputs)))
    splits = max(1, min(_MAX_SPLITS, k // _SPLIT_INPUTS, max_splits))
    return max(choose_splits(n, k, outputs, inputs), 1 << (splits.bit_length() - 1))


def _launch_vector(
    x: Tensor, packed: Int4Weight, summands: tuple[Tensor | None, Tensor | None], norm: Norm | None, out: Tensor,
    config: Config, gated: bool,
) -> None:  # fmt: skip
    pdl = config.pdl and supports_pdl(x)
    of_norm, eps = (None, 0.0) if norm is None else norm
    if of_norm is not None and of_norm.dtype != torch.float32:
        assert of_norm.dtype == x.dtype, (of_norm.dtype, x.dtype)
        of_norm = of_norm.view(torch.int32)
    int4_vector_kernel[(triton.cdiv(out.shape[1], config.outputs),)](
        x.view(torch.int32), packed.weight.view(torch.int32), packed.scales, packed.zeros, *summands, of_norm, out, eps,
        out.shape[1], K=packed.inputs, GROUP=packed.group, OUTPUTS=config.outputs, INPUTS=config.inputs,
        GATED=gated, BF16=x.dtype == torch.bfloat16, PDL=pdl, num_warps=config.warps, **pdl_options(pdl),
    )  # fmt: skip


def _launch_tiles(
    x: Tensor, packed: Int4Weight, summands: tuple[Tensor | None, Tensor | None], out: Tensor, config: Config,
    workspace: SplitWorkspace | None, gated: bool,
) -> None:  # fmt: skip
    if has_tensor_memory(x.device):
        config = config._replace(inputs=_CHUNK)
    outputs = out.shape[1]
    tiles = triton.cdiv(outputs, config.outputs)
    scratch = checked_workspace(workspace, config, tiles)[:3] if config.splits > 1 else (None, None, None)
    share = triton.cdiv(triton.cdiv(packed.inputs, config.inputs), config.splits) * config.inputs
    pdl = config.pdl and supports_pdl(x)
    int4_tile_kernel[(tiles, config.splits)](
        x, packed.weight, packed.scales, packed.zeros, *summands, out, *scratch, len(x), outputs, x.stride(0),
        K=packed.inputs, GROUP=packed.group, ROWS=config.rows, OUTPUTS=config.outputs, INPUTS=config.inputs,
        SPLITS=config.splits, GATED=gated, PAIRED=x.device.type != "cpu", PDL=pdl,
        PREFETCH=prefetched_lines(config, min(share, packed.inputs) // 4, packed.weight) if pdl else 0,
        num_warps=config.warps, num_stages=_fitting_stages(config, x, gated), **pdl_options(pdl),
    )  # fmt: skip


def _fitting_stages(config: Config, x: Tensor, gated: bool) -> int:
    """The stages of a config, or as many as a program has shared memory for."""
    weights = (2 if gated else 1) * config.outputs * config.inputs // 2  # bytes
    buffer = weights + config.rows * config.inputs * x.element_size()
    buffers = (shared_memory(x.device) - _SCRATCH) // buffer
    return max(1, min(config.stages, buffers if has_async_mma(x.device) else buffers + 1))
