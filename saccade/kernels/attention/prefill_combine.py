"""Combines the partial results of split-KV prefill attention and of MLA. Knows tokens and heads, no keys."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels.launch.pdl import pdl_options, pdl_release_then_wait, supports_pdl
from saccade.kernels.launch.varlen_tiles import power_of_two

MAX_SPLITS = 16  # of prefill; decode with MLA has more
_MAX_VALUES = 8192  # that a program holds


class Partials(NamedTuple):
    """What the splits found. Rows of a token that no window has are never written."""

    mixed: Tensor  # float32 [splits, T, heads, d]: sums of values, not yet divided
    maxima: Tensor  # float32 [splits, T, heads]: the maximum, or level, that weights are relative to
    sums: Tensor  # the same: sum of weights
    active: Tensor  # int32 [T]: splits that have keys for this token; 0 where its result is written already


def new_partials(splits: int, out: Tensor) -> Partials:
    sums = torch.empty((2, splits, *out.shape[:2]), dtype=torch.float32, device=out.device)
    mixed = torch.empty((splits, *out.shape), dtype=torch.float32, device=out.device)
    return Partials(mixed, sums[0], sums[1], torch.empty(len(out), dtype=torch.int32, device=out.device))


def combine(partials: Partials, out: Tensor) -> None:
    tokens, heads, dim = out.shape
    splits = len(partials.mixed)
    columns = min(power_of_two(dim), _MAX_VALUES // power_of_two(splits))
    pdl = supports_pdl(out)
    _combine_kernel[(tokens, heads, triton.cdiv(dim, columns))](
        *partials, out, splits, tokens * heads, DIM=dim, COLUMNS=columns, SPLITS=power_of_two(splits),
        PDL=pdl, num_warps=2, **pdl_options(pdl),
    )  # fmt: skip


@triton.jit(do_not_specialize=["max_splits", "cells"])
def _combine_kernel(
    mixed: tl.tensor, maxima: tl.tensor, sums: tl.tensor, active: tl.tensor, out: tl.tensor, max_splits: tl.tensor,
    cells: tl.tensor,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Columns of one token and head: the softmax over all splits that have keys for it."""
    pdl_release_then_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    count = tl.minimum(tl.load(active + token), max_splits)  # undefined for a token that no window has
    if count == 0:
        return
    cell = token * tl.num_programs(1) + tl.program_id(1)
    splits, dims = tl.arange(0, SPLITS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    present = splits < count
    part = splits.to(tl.int64) * cells + cell
    each_largest = tl.load(maxima + part, mask=present, other=float("-inf"))
    each_total = tl.load(sums + part, mask=present, other=0.0)
    readable = present[:, None] & (dims < DIM)[None, :]
    found = tl.load(mixed + part[:, None] * DIM + dims[None, :], mask=readable, other=0.0)  # [SPLITS, COLUMNS]
    weights = tl.exp2(each_largest - tl.max(each_largest, 0))
    whole = tl.sum(found * weights[:, None], 0) / tl.sum(each_total * weights, 0)
    tl.store(out + cell * DIM + dims, whole.to(out.dtype.element_ty), mask=dims < DIM)
