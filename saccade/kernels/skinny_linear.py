"""Products of a few rows with a large weight, as a decode step has them. Knows shapes and dtypes, not layers.

Such a product takes as long as reading its weight, so each variant is a way to keep the memory busy: one row goes
through `vector_kernel`, up to 128 through `tile_kernel`, and where cuBLAS does as well, through `F.linear`. `choose`
decides from the shape alone, so a CUDA graph may hold the launches, and nothing is tuned while serving.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from saccade.kernels.fused_norm import silu_and_mul
from saccade.kernels.skinny_kernels import tile_kernel, vector_kernel
from saccade.kernels.softmax import precision_of
from saccade.kernels.tiles import power_of_two

_MAX_ROWS = 128
_MAX_NORMED_ROWS = 16  # beyond, norming x again in every program costs more than a launch of its own
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
    ahead: int = 0  # cache lines of each weight row asked for while the launch ahead still runs; 0: start after it


class SplitWorkspace(NamedTuple):
    """Scratch memory of products whose columns are split. One is enough for all layers; two streams need two."""

    partials: Tensor  # float32 [programs * outputs * rows]: products of a split's columns
    squares: Tensor  # float32 [programs * rows]: sums of squares, for the norm
    counters: Tensor  # int32 [programs]: splits that have arrived at a tile; zero between launches

    @classmethod
    def allocate(cls, max_rows: int, device: torch.device) -> SplitWorkspace:
        """Room for every launch that `choose` gives for up to `max_rows` rows."""
        rows = power_of_two(min(max_rows, _MAX_ROWS), least=16)
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
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x @ weight.T + bias + residual: [M, N], added up in float32 and rounded once to `out_dtype`, or x's."""
    config = config or choose(len(x), weight.shape[0], weight.shape[1], x.dtype)
    if config is None:
        out = F.linear(x, weight, bias)
        return (out if residual is None else out.add_(residual)).to(out_dtype or x.dtype)
    return _launch(_Product(x, weight, bias, residual), config, workspace, out_dtype)


def norm_linear(
    x: Tensor,  # [M, K]
    norm_weight: Tensor,  # [K]
    eps: float,
    weight: Tensor,  # [N, K]
    bias: Tensor | None = None,
    *,
    workspace: SplitWorkspace | None = None,
    config: Config | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """rms_norm(x) @ weight.T + bias: [M, N]."""
    config = config or choose(len(x), weight.shape[0], weight.shape[1], x.dtype)
    if config is None or not norms(config, x.dtype):
        x = F.rms_norm(x, norm_weight.shape, norm_weight, eps)
        return skinny_linear(x, weight, bias, workspace=workspace, config=config, out_dtype=out_dtype)
    return _launch(_Product(x, weight, bias, None, norm_weight, eps), config, workspace, out_dtype)


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

    | rows     | outputs of a program                               | columns at a time            |
    | -------- | -------------------------------------------------- | ---------------------------- |
    | 1        | 4, or 8 where that still fills the device          | 512                          |
    | 2 - 16   | 16, or 32 or 64 where that still fills the device  | 256, 128 or 64; gated half   |
    | 17 - 128 | 64, columns split until the device is full         | 128; gated or from 65 on, 64 |

    Programs are kept small enough for two of them to share a multiprocessor: when there are a few more programs than
    multiprocessors, the last ones then need not wait for the first.
    """
    if m > _MAX_ROWS or k % 16:  # rows of a weight that do not begin at 32 bytes cannot be read in wide pieces
        return None
    if dtype == torch.float32:
        return _choose_exact(m)
    if m == 1:
        return Config(rows=1, outputs=8 if n >= 64 * _PROGRAMS and not gated else 4, inputs=512)
    if m <= _MAX_NORMED_ROWS:
        outputs = next((o for o in (64, 32) if n >= o * 2 * _PROGRAMS), 16)
        return Config(16, outputs, inputs=4096 // outputs // (2 if gated else 1), warps=outputs // 16, stages=5)
    rows = power_of_two(m, least=32)
    if gated:
        return Config(rows, outputs=64, inputs=64, warps=8 if rows == _MAX_ROWS else 4, stages=3)
    inputs = 64 if rows == _MAX_ROWS else 128
    return Config(rows, outputs=64, inputs=inputs, splits=choose_splits(n, k, 64, inputs))


def _choose_exact(m: int) -> Config:
    """float32 is for those who compare: any launch that fits will do."""
    if m == 1:
        return Config(rows=1, outputs=4, inputs=512, stages=3)
    return Config(rows=power_of_two(m, least=16), outputs=16, inputs=32, stages=2)


def choose_splits(n: int, k: int, outputs: int, inputs: int) -> int:
    """As many as still fit the device at once, none without columns."""
    tiles, steps = triton.cdiv(n, outputs), triton.cdiv(k, inputs)
    wanted = max(1, min(_PROGRAMS // tiles, steps))
    return int(triton.cdiv(steps, triton.cdiv(steps, wanted)))


def norms(config: Config, dtype: torch.dtype) -> bool:
    """Whether a launch can norm its rows. The matrix units get x before it is divided: float16 may not hold that."""
    return config.rows == 1 or (config.rows <= _MAX_NORMED_ROWS and dtype != torch.float16)


def _split_outputs(rows: int) -> int:
    """The most weight rows of a program in a launch with splits."""
    return 128 if rows >= 64 else 64


# --- launching ----------------------------------------------------------------------------------------------------


class _Product(NamedTuple):
    x: Tensor  # [M, K]
    weight: Tensor  # [N, K], or [2 N, K] if gated
    bias: Tensor | None = None
    residual: Tensor | None = None
    norm_weight: Tensor | None = None  # norm x first
    eps: float = 0.0
    gated: bool = False


def _launch(
    product: _Product, config: Config, workspace: SplitWorkspace | None, out_dtype: torch.dtype | None
) -> Tensor:
    x, weight = product.x, product.weight
    _check(product, config)
    outputs = len(weight) // 2 if product.gated else len(weight)
    out = torch.empty((len(x), outputs), dtype=out_dtype or x.dtype, device=x.device)
    if config.rows == 1:
        _launch_vector(product, config, out)
    else:
        _launch_tiles(product, config, workspace, out)
    return out


def _launch_vector(product: _Product, config: Config, out: Tensor) -> None:
    x, weight, bias, residual, norm_weight, eps, gated = product
    inputs = x.shape[1]
    vector_kernel[(triton.cdiv(out.shape[1], config.outputs),)](
        x, weight, bias, residual, norm_weight, out, eps, out.shape[1],
        K=inputs, OUTPUTS=config.outputs, INPUTS=config.inputs, STAGES=config.stages, GATED=gated,
        AHEAD=_lines_ahead(config, inputs, weight),
        num_warps=config.warps, num_stages=config.stages, **_overlap(config),
    )  # fmt: skip


def _launch_tiles(product: _Product, config: Config, workspace: SplitWorkspace | None, out: Tensor) -> None:
    x, weight, bias, residual, norm_weight, eps, gated = product
    (rows, inputs), outputs = x.shape, out.shape[1]
    tiles, splits = triton.cdiv(outputs, config.outputs), config.splits
    partials, squares, counters = _room(workspace, config, tiles) if splits > 1 else (None, None, None)
    share = triton.cdiv(triton.cdiv(inputs, config.inputs), splits) * config.inputs
    tile_kernel[(tiles, splits)](
        x, weight, bias, residual, norm_weight, out, partials, squares, counters, eps, rows, outputs, x.stride(0),
        K=inputs, ROWS=config.rows, OUTPUTS=config.outputs, INPUTS=config.inputs, SPLITS=splits, GATED=gated,
        PRECISION=precision_of(x), AHEAD=_lines_ahead(config, min(share, inputs), weight),
        num_warps=config.warps, num_stages=config.stages, **_overlap(config),
    )  # fmt: skip


def _lines_ahead(config: Config, columns: int, weight: Tensor) -> int:
    """Cache lines to ask for: a power of two, within a program's columns."""
    lines = min(config.ahead, max(1, columns * weight.element_size() // _LINE))
    return 1 << (lines.bit_length() - 1) if lines else 0


def _overlap(config: Config) -> dict[str, bool]:
    return {"launch_pdl": True} if config.ahead else {}


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
