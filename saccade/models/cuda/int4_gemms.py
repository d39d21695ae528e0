"""Layers whose weights are packed in INT4 (`Linear.groups`), on a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels.gemm.int4_linear import MAX_INT4_ROWS, Int4Weight, Norm, int4_linear
from saccade.kernels.gemm.skinny import MAX_ROWS, Config, SplitWorkspace, library_linear
from saccade.kernels.launch.kernel_choice import KernelChoice, assert_agree
from saccade.kernels.ops.norm import rms_norm, silu_and_mul
from saccade.kernels.ops.unpack_int4 import unpack_int4, unpack_without_kernel
from saccade.models.layers.decoder import Decoder
from saccade.models.layers.layernorm import RMSNorm
from saccade.models.layers.linear import Linear


def is_packed(linear: Linear) -> bool:
    """PyTorch's own layers never are."""
    return getattr(linear, "groups", None) is not None


def elements_of(linear: Linear) -> int:
    """Numbers of a weight, packed or not."""
    return len(linear.weight) * inputs_of(linear)


def inputs_of(linear: Linear) -> int:
    return linear.inputs if is_packed(linear) else linear.weight.shape[1]


def own_weight(linear: Linear) -> Int4Weight:
    assert linear.groups is not None
    return Int4Weight(linear.weight, linear.groups.scales, linear.groups.zeros)


def packed_linear(
    x: Tensor,
    linear: Linear,
    residual: Tensor | None = None,
    *,
    workspace: SplitWorkspace,
    norm: RMSNorm | None = None,
    gated: bool = False,
    config: Config | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Rows, normed first if asked, by its weight: as it is packed, or unpacked for cuBLAS."""
    groups = linear.groups
    assert groups is not None
    if not reads_packed(x):
        normed = x if norm is None else rms_norm(x, norm.weight, norm.eps)
        return _unpacked_linear(normed, linear, residual, workspace, gated, out)
    before = None if norm is None else Norm(norm.weight, norm.eps)
    if groups.order is not None:
        x = x if norm is None else rms_norm(x, norm.weight, norm.eps)
        x, before = in_order(x, linear), None
    return int4_linear(
        x,
        own_weight(linear),
        linear.bias,
        residual,
        norm=before,
        gated=gated,
        workspace=workspace,
        config=config,
        out=out,
    )


def _unpacked_linear(
    x: Tensor,
    linear: Linear,
    residual: Tensor | None,
    workspace: SplitWorkspace,
    gated: bool,
    out: Tensor | None,
) -> Tensor:
    weight = unpacked(linear, workspace)
    found = library_linear(in_order(x, linear), weight, linear.bias, None if gated else out)
    if gated:
        return silu_and_mul(found)
    return found if residual is None else found.add_(residual)


def in_order(x: Tensor, linear: Linear) -> Tensor:
    """Columns of x as those of the packed weight are."""
    assert linear.groups is not None
    order = linear.groups.order
    return x if order is None else x.index_select(1, order)


def unpacked(linear: Linear, workspace: SplitWorkspace) -> Tensor:
    """Its weight [outputs, inputs] for more rows, its columns as packed; valid until the next one.

    The next kernel must wait for it: not one that reads weights before the previous kernel has ended.
    """
    groups = linear.groups
    assert groups is not None and workspace.unpacked is not None
    out = workspace.unpacked[: elements_of(linear)].view(-1, linear.inputs)
    unpack = unpack_int4 if can_unpack(out.device, out.dtype) else unpack_without_kernel
    return unpack(linear.weight, groups.scales, groups.zeros, out)


def all_packed(decoder: Decoder) -> bool:
    """Whether every layer is, and has whole tiles of 64 rows for split-K, also those of a gate."""
    return all(is_packed(linear) and len(linear.weight) % 128 == 0 for linear in _linears(decoder))


def unpacked_elements(decoder: Decoder) -> int:
    """Of the largest weight that `unpacked` may be asked for; 0: none is packed."""
    return max((elements_of(linear) for linear in _linears(decoder) if is_packed(linear)), default=0)


def decide_int4(decoder: Decoder) -> bool:
    """Whether a layer is packed; then also which kernels are used, before a CUDA graph is captured."""
    if not unpacked_elements(decoder):
        return False
    _can_multiply(decoder.table.device, decoder.table.dtype)
    can_unpack(decoder.table.device, decoder.table.dtype)
    return True


def reads_packed(x: Tensor) -> bool:
    """Whether a kernel multiplies so many rows with a packed weight."""
    return len(x) <= MAX_INT4_ROWS and _can_multiply(x.device, x.dtype)


def random_weight(
    device: torch.device, outputs: int, inputs: int, group: int, *, has_zeros: bool = True
) -> Int4Weight:
    """For self-tests: results near 1."""
    packed = torch.randint(-(2**15), 2**15, (outputs, inputs // 4), device=device, dtype=torch.int16)
    scales = (torch.rand(outputs, inputs // group, device=device) + 0.5) / (4.6 * inputs**0.5)
    zeros = torch.randint(6, 11, scales.shape, device=device, dtype=torch.uint8) if has_zeros else None
    return Int4Weight(packed, scales.to(torch.float16), zeros)


def _weight_and_meaning(device: torch.device) -> tuple[Int4Weight, Tensor]:
    own = random_weight(device, 64, 2048, 64)
    return own, unpack_without_kernel(*own, torch.empty(64, own.inputs, device=device))


def _test_gemms(device: torch.device, dtype: torch.dtype) -> None:
    own, meant = _weight_and_meaning(device)
    workspace = SplitWorkspace.allocate(MAX_ROWS, device)
    for rows in (1, 8, MAX_INT4_ROWS):
        x = torch.randn(rows, own.inputs, device=device, dtype=dtype)
        expected = F.linear(x.float(), meant)
        assert_agree(int4_linear(x, own, workspace=workspace).float(), expected, 0.05)
        gate, up = expected.chunk(2, dim=-1)
        assert_agree(int4_linear(x, own, gated=True).float(), F.silu(gate) * up, 0.05)


def _test_unpacking(device: torch.device, dtype: torch.dtype) -> None:
    own, meant = _weight_and_meaning(device)
    out = torch.empty(meant.shape, device=device, dtype=dtype)
    assert_agree(unpack_int4(*own, out).float(), meant, 1e-3)  # less than a step


def _supports(device: torch.device, dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16)


_can_multiply = KernelChoice(
    "the INT4 GEMM of a few rows", _supports, _test_gemms, "weights are unpacked for it"
)
can_unpack = KernelChoice(
    "the kernel that unpacks INT4", lambda *_: True, _test_unpacking, "PyTorch dequantises weights"
)
"""(device, dtype of the model)"""


def _linears(decoder: Decoder) -> Iterator[Linear]:
    """Of attention and MLPs."""
    for layer in decoder.layers:
        for module in (layer.attention, layer.mlp):
            yield from (part for part in vars(module).values() if isinstance(part, Linear))
