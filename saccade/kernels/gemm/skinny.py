"""Products of a few rows with a large weight, as a decode step has them. Knows shapes and dtypes, not layers.

Such a product takes as long as reading its weight, so each variant is a way to keep the memory busy: one row goes
through `vector_kernel`, up to 32 through `tile_kernel`, and more, where cuBLAS does better, through `F.linear`.
`choose` decides from the shape alone, so a CUDA graph may hold the launches, and nothing is tuned while serving.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from saccade.kernels.gemm.skinny_kernels import tile_kernel, vector_kernel
from saccade.kernels.launch.device import precision_of
from saccade.kernels.launch.pdl import overlap, supports_pdl
from saccade.kernels.launch.tiling import power_of_two
from saccade.kernels.ops.norm import silu_and_mul

MAX_ROWS = 32  # that `choose` has launches for
MAX_NORMED_ROWS = 16  # beyond, norming x again in every program costs more than a launch of its own
MAX_ELEMENTS = 32 << 20  # of a weight that several rows are multiplied with
_MANY_OUTPUTS = 1 << 16
_PROGRAMS = 132  # that a launch should have at least: one for each multiprocessor of an H100 or H200
_MAX_PROGRAMS = 2 * _PROGRAMS  # of a launch with splits; the workspace has room for these
_LINE = 128  # bytes


class Config(NamedTuple):
    """The sizes a product is launched with."""

    rows: int  # of x, at most: 1 for the plain units, else a power of two from 16 for the matrix units
    outputs: int  # weight rows of a program; of the gate and as many of `up` where there is one
    inputs: int  # columns it reads at a time
    splits: int = 1  # programs that share the columns of a tile
    warps: int = 4
    stages: int = 4  # reads in flight ahead of their use
    early: bool = True  # start while the launch ahead still runs, where the device can
    ahead: int = 0  # cache lines of each weight row asked for then


class SplitWorkspace(NamedTuple):
    """Scratch memory of products whose columns are split. One is enough for all layers; two streams need two."""

    partials: Tensor  # float32 [programs * outputs * rows]: products of a split's columns
    squares: Tensor  # float32 [programs * rows]: sums of squares, for the norm
    counters: Tensor  # int32 [programs]: splits that have arrived at a tile; zero between launches

    @classmethod
    def allocate(cls, max_rows: int, device: torch.device) -> SplitWorkspace:
        """Room for every launch that `choose` gives for up to `max_rows` rows."""
        rows = power_of_two(max_rows, minimum=16)
        return cls(
            torch.empty(_MAX_PROGRAMS * _split_outputs(rows) * rows, dtype=torch.float32, device=device),
            torch.empty(_MAX_PROGRAMS * rows, dtype=torch.float32, device=device),
            torch.zeros(_MAX_PROGRAMS, dtype=torch.int32, device=device),
        )


def skinny_linear(
    x: Tensor,  # [M, K], the last dimension dense
    weight: Tensor,  # [N, K], contiguous
    bias: Tensor | None = None,  # [N]
    residual: Tensor | None = None,  # [M, N], contiguous
    *,
    workspace: SplitWorkspace | None = None,
    config: Config | None = None,
    out: Tensor | None = None,  # [M, N], contiguous
) -> Tensor:
    """x @ weight.T + bias + residual: [M, N], added up in float32 and rounded once to the type of `out`, or of x."""
    config = config or choose(len(x), weight.shape[0], weight.shape[1], x.dtype)
    if config is None:
        found = _library_linear(x, weight, bias, out)
        return found if residual is None else found.add_(residual)
    return _launch(_Product(x, weight, bias, residual), config, workspace, out)


def norm_linear(
    x: Tensor,  # [M, K]
    norm_weight: Tensor,  # [K]
    eps: float,
    weight: Tensor,  # [N, K]
    bias: Tensor | None = None,
    *,
    workspace: SplitWorkspace | None = None,
    config: Config | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """rms_norm(x) @ weight.T + bias: [M, N]."""
    config = config or choose(len(x), weight.shape[0], weight.shape[1], x.dtype)
    if config is None or not norms(config, x.dtype):
        x = F.rms_norm(x, norm_weight.shape, norm_weight, eps)
        return skinny_linear(x, weight, bias, workspace=workspace, config=config, out=out)
    return _launch(_Product(x, weight, bias, None, norm_weight, eps), config, workspace, out)


def gated_linear(x: Tensor, gate_up_weight: Tensor, *, config: Config | None = None) -> Tensor:
    """x [M, K], weight [2 wide, K] with the gate's rows first -> silu(x @ gate.T) * (x @ up.T): [M, wide]."""
    wide, inputs = len(gate_up_weight) // 2, x.shape[1]
    config = config or choose(len(x), wide, inputs, x.dtype, gated=True)
    if config is None:
        return silu_and_mul(F.linear(x, gate_up_weight))
    return _launch(_Product(x, gate_up_weight, gated=True), config, None, None)


def norm_gated_linear(
    x: Tensor, norm_weight: Tensor, eps: float, gate_up_weight: Tensor, *, config: Config | None = None
) -> Tensor:
    """`gated_linear` of rms_norm(x)."""
    wide, inputs = len(gate_up_weight) // 2, x.shape[1]
    config = config or choose(len(x), wide, inputs, x.dtype, gated=True)
    if config is None or not norms(config, x.dtype):
        return gated_linear(F.rms_norm(x, norm_weight.shape, norm_weight, eps), gate_up_weight, config=config)
    return _launch(_Product(x, gate_up_weight, None, None, norm_weight, eps, gated=True), config, None, None)


# --- choosing -----------------------------------------------------------------------------------------------------


def choose(m: int, n: int, k: int, dtype: torch.dtype, *, gated: bool = False) -> Config | None:
    """How to multiply m rows with a weight [n, k], or [2 n, k] if gated; None where cuBLAS is as good.

    cuBLAS has the better loop, ours has fewer launches and starts earlier: several rows are ours where a weight is read
    in a few microseconds, one row always is. Columns are split between programs until the device is full.
    """
    if m > MAX_ROWS or k % 16:  # rows of a weight that do not begin at 32 bytes cannot be read in wide pieces
        return None
    if dtype == torch.float32:  # asked for by those who compare
        return None
    if m == 1:
        return _choose_vector(n, k, gated)
    if n * k * (2 if gated else 1) > MAX_ELEMENTS:
        return None
    return _choose_few(n, k, gated) if m <= MAX_NORMED_ROWS else _choose_tiles(n, k, gated)


def _choose_vector(n: int, k: int, gated: bool) -> Config:
    """Long rows need their reads in flight; of short ones, many programs side by side do as well without."""
    if gated:
        return Config(rows=1, outputs=4, inputs=512, early=False)
    if k > 4096:
        return Config(rows=1, outputs=2, inputs=1024, ahead=8)
    return Config(rows=1, outputs=4, inputs=512, stages=1 if k <= 2048 or n >= _MANY_OUTPUTS else 4)


def _choose_few(n: int, k: int, gated: bool) -> Config:
    if gated:
        return Config(rows=16, outputs=64, inputs=64, stages=5, early=False)
    return Config(rows=16, outputs=64, inputs=64, splits=choose_splits(n, k, 64, 64), stages=5)


def _choose_tiles(n: int, k: int, gated: bool) -> Config:
    if gated:
        return Config(rows=32, outputs=64, inputs=64, stages=5, early=False)
    splits = choose_splits(n, k, 64, 128)
    return Config(rows=32, outputs=64, inputs=128, splits=splits, stages=7 if k > 4096 else 4)


def choose_splits(n: int, k: int, outputs: int, inputs: int) -> int:
    """As many as still fit the device at once, none without columns."""
    tiles, steps = triton.cdiv(n, outputs), triton.cdiv(k, inputs)
    wanted = max(1, min(_PROGRAMS // tiles, steps))
    return int(triton.cdiv(steps, triton.cdiv(steps, wanted)))


def norms(config: Config, dtype: torch.dtype) -> bool:
    """Whether a launch can norm its rows. The matrix units get x before it is divided: float16 may not hold that."""
    return config.rows == 1 or (config.rows <= MAX_NORMED_ROWS and dtype != torch.float16)


def _split_outputs(rows: int) -> int:
    """The most weight rows of a program in a launch with splits."""
    return 128 if rows >= 64 else 64


def _library_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
    if out is None:
        return F.linear(x, weight, bias)
    return torch.mm(x, weight.T, out=out) if bias is None else torch.addmm(bias, x, weight.T, out=out)


# --- launching ----------------------------------------------------------------------------------------------------


class _Product(NamedTuple):
    x: Tensor  # [M, K]
    weight: Tensor  # [N, K], or [2 N, K] if gated
    bias: Tensor | None = None
    residual: Tensor | None = None
    norm_weight: Tensor | None = None  # norm x first
    eps: float = 0.0
    gated: bool = False


def _launch(product: _Product, config: Config, workspace: SplitWorkspace | None, out: Tensor | None) -> Tensor:
    x, weight = product.x, product.weight
    _check(product, config)
    outputs = len(weight) // 2 if product.gated else len(weight)
    out = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device) if out is None else out
    assert out.shape == (len(x), outputs) and out.is_contiguous()
    if config.rows == 1:
        _launch_vector(product, config, out)
    else:
        _launch_tiles(product, config, workspace, out)
    return out


def _launch_vector(product: _Product, config: Config, out: Tensor) -> None:
    x, weight, bias, residual, norm_weight, eps, gated = product
    inputs, early = x.shape[1], config.early and supports_pdl(x)
    vector_kernel[(triton.cdiv(out.shape[1], config.outputs),)](
        x, weight, bias, residual, norm_weight, out, eps, out.shape[1],
        K=inputs, OUTPUTS=config.outputs, INPUTS=config.inputs, STAGES=config.stages, GATED=gated,
        EARLY=early, AHEAD=_lines_ahead(config, inputs, weight) if early else 0,
        num_warps=config.warps, num_stages=config.stages, **overlap(early),
    )  # fmt: skip


def _launch_tiles(product: _Product, config: Config, workspace: SplitWorkspace | None, out: Tensor) -> None:
    x, weight, bias, residual, norm_weight, eps, gated = product
    (rows, inputs), outputs = x.shape, out.shape[1]
    tiles, splits = triton.cdiv(outputs, config.outputs), config.splits
    partials, squares, counters = _room(workspace, config, tiles) if splits > 1 else (None, None, None)
    share = triton.cdiv(triton.cdiv(inputs, config.inputs), splits) * config.inputs
    early = config.early and supports_pdl(x)
    tile_kernel[(tiles, splits)](
        x, weight, bias, residual, norm_weight, out, partials, squares, counters, eps, rows, outputs, x.stride(0),
        K=inputs, ROWS=config.rows, OUTPUTS=config.outputs, INPUTS=config.inputs, SPLITS=splits, GATED=gated,
        PRECISION=precision_of(x), EARLY=early, AHEAD=_lines_ahead(config, min(share, inputs), weight) if early else 0,
        num_warps=config.warps, num_stages=config.stages, **overlap(early),
    )  # fmt: skip


def _lines_ahead(config: Config, columns: int, weight: Tensor) -> int:
    """Cache lines to ask for: a power of two, within a program's columns."""
    lines = min(config.ahead, max(1, columns * weight.element_size() // _LINE))
    return 1 << (lines.bit_length() - 1) if lines else 0


def _room(workspace: SplitWorkspace | None, config: Config, tiles: int) -> SplitWorkspace:
    programs = tiles * config.splits
    needed = programs * config.outputs * config.rows
    if workspace is None:
        raise ValueError(f"{config.splits} splits of {tiles} tiles need a workspace: pass SplitWorkspace.allocate(...)")
    room = workspace.partials.numel()
    if needed > room or programs * config.rows > workspace.squares.numel() or tiles > workspace.counters.numel():
        raise ValueError(
            f"{config.splits} splits of {tiles} tiles need {needed} floats and {tiles} counters of workspace; there are"
            f" {room} and {workspace.counters.numel()}: allocate it for more rows, or split less"
        )
    return workspace


def _check(product: _Product, config: Config) -> None:
    x, weight, _, residual, norm_weight, _, gated = product
    if len(x) > config.rows:
        raise ValueError(f"{len(x)} rows do not fit a launch for {config.rows}; choose a config for more rows")
    if gated and config.splits > 1:
        raise ValueError(f"a gated product cannot be split, and {config.splits} splits were asked for; use splits=1")
    assert x.dtype == weight.dtype and x.shape[1] == weight.shape[1], (x.shape, x.dtype, weight.shape, weight.dtype)
    assert x.stride(1) == 1 and weight.is_contiguous()
    assert residual is None or residual.is_contiguous()
    assert norm_weight is None or norms(config, x.dtype), f"{config} cannot norm {x.dtype}"
